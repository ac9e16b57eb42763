"""ssh as the engine: an agent on each machine that the user can log in to."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from gpuslice.errors import EnvironmentUnusableError, GpusliceError, NodeLostError
from gpuslice.nodes.channel import no_answer
from gpuslice.nodes.plan import KEYS, Answer, Config, Found, Host, Remark, Wanted, of_node
from gpuslice.nodes.ray_nodes import Node
from gpuslice.nodes.relay_carrier import RelayCarrier
from gpuslice.nodes.routes import Boundaries, choose, decode
from gpuslice.nodes.shipping import Progress, bring
from gpuslice.sched_core.nodes import curve
from gpuslice.sched_core.nodes.endpoint import host_and_port
from gpuslice.sched_core.nodes.local_node import rank_endpoint

from . import preflight, ssh
from .host_process import Request, Told, this_machine

_T = TypeVar("_T")


class SshEngine:
    """The engine of machines that are reached by ssh.

    Parameters
    ----------
    wanted
        The request.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def find(self) -> Answer:
        """Return the machines that can be used, this one first."""
        wanted = self._wanted
        here = preflight.look(of_node("", wanted.devices), wanted.working_directory)
        own, remarks = preflight.judge(wanted, Found("", "", "", ""), here, here, here.unix_s)
        assert own is not None
        nodes = [own]
        remarks += [Remark(host.name, "--without names it") for host in wanted.hosts if self._is_out(host)]
        hosts = [host for host in wanted.hosts if not self._is_out(host)]
        for host, answer in zip(hosts, _all(self._look, hosts), strict=True):
            told, heard_s = (Told(), 0.0) if isinstance(answer, GpusliceError) else answer
            facts = answer if isinstance(answer, GpusliceError) else told.facts
            if facts is None:
                facts = EnvironmentUnusableError(told.error, told.remedy)
            found = Found(host.name, host.address, "", told.address, directory=told.directory)
            node, said = preflight.judge(wanted, found, here, facts, heard_s)
            remarks += said
            nodes += [node] if node is not None else []
        nodes[0] = msgspec.structs.replace(own, address=_own_address(nodes[1:]))
        return Answer(tuple(nodes), tuple(remarks))

    def begin(self) -> Answer:
        """Start an agent on each machine."""
        return self._each("begin")

    def end(self) -> Answer:
        """End the agents that are left. Those that were told to leave have left."""
        return self._each("end")

    def bring(self, job: str, progress: Progress) -> None:
        """Bring a snapshot over the sockets of the agents."""
        wanted = self._wanted
        there = {node.name: Node(node.name, node.name) for node in wanted.nodes}
        if silent := {*wanted.targets, *wanted.sources} - there.keys():
            raise NodeLostError(
                f"node {min(silent)} does not answer now", "`gpuslice events` says since when"
            )
        directory = Path(wanted.directory)
        flags = {"socket": rank_endpoint(directory)}
        if wanted.ramdisk_dir:
            flags["ramdisk_dir"] = wanted.ramdisk_dir
        with relay(directory, wanted.endpoint, flags) as carrier:
            held = self._held(carrier, job, there)
            bring(job, wanted.targets, there, held, carrier, progress)

    def _held(self, carrier: RelayCarrier, job: str, there: Mapping[str, Node]) -> dict[str, Boundaries]:
        """Return what nodes have of ``job``: those that it comes from and goes to, and others if need be.

        Where a rank comes from the node that it goes to, any node may have its state.
        """
        wanted = self._wanted
        first = {*wanted.sources, *wanted.targets}
        known = all(source != target for source, target in zip(wanted.sources, wanted.targets, strict=True))
        held: dict[str, Boundaries] = {}
        for names in ([*first], [name for name in there if name not in first]):
            carrier.start(there[name] for name in names)
            for name in names:
                try:
                    held[name] = decode(carrier.call(there[name], "boundaries", job, len(wanted.targets)))
                except NodeLostError:
                    if name in first:
                        raise
            if known and choose(held, wanted.targets) is not None:
                break
        return held

    def _is_out(self, host: Host) -> bool:
        return host.name in self._wanted.without

    def _look(self, host: Host) -> tuple[Told, float]:
        devices = of_node(host.name, self._wanted.devices)
        return self._ask(host, "find", devices)

    def _each(self, word: str) -> Answer:
        """Ask all machines that are nodes."""
        nodes = {node.name: node for node in self._wanted.nodes}
        hosts = [host for host in self._wanted.hosts if host.name in nodes]
        begun, remarks = [nodes[name] for name in nodes if not name], []
        for host, answer in zip(hosts, _all(lambda host: self._ask(host, word), hosts), strict=True):
            if isinstance(answer, GpusliceError):
                remarks.append(Remark.of(host.name, answer))
            elif (told := answer[0]).error:
                remarks.append(Remark(host.name, told.error, told.remedy))
            else:
                begun.append(nodes[host.name])
        return Answer(tuple(begun), tuple(remarks))

    def _ask(self, host: Host, word: str, devices: Sequence[str] = ()) -> tuple[Told, float]:
        wanted = self._wanted
        agent = wanted.agents.get(host.name)
        request = Request(
            name=host.name,
            scheduler=_fingerprint(wanted.directory),
            devices=tuple(devices),
            working_directory=wanted.working_directory,
            agent=agent if word == "begin" else None,
            endpoints=() if agent is None else _endpoints(agent.endpoint),
            machine=this_machine(),
        )
        reply = ssh.run(host, word, msgspec.json.encode(request))
        try:
            return msgspec.json.decode(reply.data, type=Told), reply.heard_s
        except msgspec.DecodeError as error:
            raise EnvironmentUnusableError(
                f"gpuslice on {host.address} answers as another version does: {error}",
                "install the same version there",
            ) from error


def relay(directory: Path, endpoint: str, flags: Mapping[str, str], answer_s: float = 30.0) -> RelayCarrier:
    """Return what moves snapshots between the nodes of a running scheduler.

    Parameters
    ----------
    directory, endpoint
        The scheduler's, and where it listens for agents.
    flags, answer_s
        As for ``RelayCarrier``.

    Raises
    ------
    EnvironmentUnusableError
        If the scheduler has ended, and its keys with it.
    """
    if not (directory / KEYS).is_dir():
        raise no_answer()
    server, own = curve.client_keys(directory / KEYS)
    host, port = host_and_port(endpoint)
    at = f"tcp://127.0.0.1:{port}" if host == "0.0.0.0" else endpoint
    told = Config("", at, server.decode(), own.public.decode(), own.secret.decode())
    return RelayCarrier(told, flags, answer_s)


def _all(ask: Callable[[Host], _T], hosts: Sequence[Host]) -> list[_T | GpusliceError]:
    """Return what each machine answers, or the error; all are asked at once."""

    def guarded(host: Host) -> _T | GpusliceError:
        try:
            return ask(host)
        except GpusliceError as error:
            return error

    with ThreadPoolExecutor(max(1, len(hosts))) as threads:
        return list(threads.map(guarded, hosts))


def _fingerprint(directory: str) -> str:
    """Return what tells this scheduler from those of other users, machines and directories."""
    who = f"{socket.gethostname()}\0{os.getuid()}\0{directory}"
    return blake2b(who.encode(errors="surrogateescape"), digest_size=4).hexdigest()


def _endpoints(endpoint: str) -> tuple[str, ...]:
    """Return where a scheduler that listens at ``endpoint`` may be reached from elsewhere."""
    host, port = host_and_port(endpoint)
    if host not in ("0.0.0.0", "::"):
        return (endpoint,)
    found = [
        one.address
        for all_of in psutil.net_if_addrs().values()
        for one in all_of
        if one.family is socket.AF_INET
    ]
    return tuple(f"tcp://{one}:{port}" for one in found)


def _own_address(others: Sequence[Found]) -> str:
    """Return this machine's address for the others: that from which it reaches the first of them."""
    for node in others:
        if node.address:
            kind = socket.AF_INET6 if ":" in node.address else socket.AF_INET
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect((node.address, 9))
                except OSError:
                    continue
                return str(probe.getsockname()[0])
    return "127.0.0.1"
