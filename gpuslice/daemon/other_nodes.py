"""The other nodes of a scheduler that was started with ``--ray`` or ``--node``: found and given agents.

A process of its own (``gpuslice.node_agents.agents``) talks to Ray or ssh. So nothing here imports Ray, and
the scheduler goes on when Ray does not.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuslice.clock import Clock
from gpuslice.config import load
from gpuslice.daemon.agent_revival import PATIENCE_S, AgentRevival, Started
from gpuslice.daemon.journal_recovery import has_unfinished_jobs
from gpuslice.daemon.node_reports import NodeReports, noted
from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.files import private_directory, replace_file, working_directory
from gpuslice.node_agents.engine_process import ask
from gpuslice.node_agents.ssh import parse_host
from gpuslice.nodes.plan import KEYS, Answer, Config, Found, Host, Remark, Wanted, of_node
from gpuslice.sched_core.lifecycle.events import Noted
from gpuslice.sched_core.nodes import curve
from gpuslice.sched_core.nodes.endpoint import host_and_port, logs_directory
from gpuslice.sched_core.nodes.node_logs import identity
from gpuslice.sched_core.nodes.remote_nodes import LOST_AFTER_S, RemoteNodes
from gpuslice.types import DeviceName, Word

#: Name in the scheduler's directory.
_FILE = "nodes.json"
#: What the transfer of a job is told, in the directory of the nodes.
_BRING = "bring-{}.json"
#: The beginning of the command of a process that talks to Ray or ssh.
_AGENTS = (sys.executable, "-m", "gpuslice.node_agents.agents")
#: The longest wait for an engine that starts, or that ends, what is on the nodes.
_BEGIN_S, _END_S = 240.0, 30.0
#: At the end, what ssh has begun on a node may take so long: it cannot be called off.
_LOGIN_S = 10.0


class Known(msgspec.Struct, frozen=True):
    """The facts that the next scheduler needs to go on with jobs on other nodes."""

    nodes: tuple[Found, ...]
    endpoint: Word
    remarks: tuple[Remark, ...] = ()


class OtherNodes:
    """The nodes of a cluster, of which this one is the first.

    Parameters
    ----------
    directory
        The scheduler's.
    devices
        What is shared on each node, or with a node's name before it on that one.
    ray
        ``auto``, or the address of the head of a cluster of Ray.
    hosts
        The nodes that are reached by ssh. There are some, or a ``ray``.
    without
        Names of nodes that are left out.
    listen
        Where agents connect, ``HOST:PORT`` or a port; empty: at any.
    lost_after_s
        When a node counts as lost of which nothing is heard.
    replicate_every
        One of so many snapshots is copied to another node; 0: none.
    say
        Called with what whoever waits for the nodes should know.

    Attributes
    ----------
    remarks
        What people should know about nodes, those included that are left out.

    Raises
    ------
    EnvironmentUnusableError
        If there is no Ray, or no cluster, or no node with a device.
    """

    def __init__(
        self,
        directory: Path,
        devices: Sequence[str],
        *,
        ray: str = "",
        hosts: Sequence[Host] = (),
        without: Sequence[str] = (),
        listen: str = "",
        lost_after_s: float = LOST_AFTER_S,
        replicate_every: int = 0,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        private_directory(directory, option="--state-dir", parents=True, by_link=True)
        self._directory = directory
        self._wanted = Wanted(
            address="" if ray == "auto" else ray,
            hosts=tuple(hosts),
            without=tuple(without),
            devices=tuple(devices),
            working_directory=working_directory(),
            directory=str(directory),
            ramdisk_dir=load().ramdisk_dir,
        )
        self._listen, self._say = listen, say
        self._lost_after_s = lost_after_s
        self.replicate_every = replicate_every
        self.remarks: tuple[Remark, ...] = ()
        self._remote: RemoteNodes | None = None
        self._agents: dict[str, Config] = {}
        self._revival: AgentRevival | None = None
        self._known = self._read()
        if self._known is None:
            found = self._ask("find", self._wanted)
            self.remarks = found.remarks
            self._known = Known(found.nodes, "", found.remarks)
            if not self.devices:
                raise self._unusable(found.remarks)
        self.reports = NodeReports(self.nodes, self._wanted.working_directory, self._known.remarks)

    @property
    def nodes(self) -> tuple[Found, ...]:
        """Return all nodes, this one first."""
        assert self._known is not None
        return self._known.nodes

    @property
    def local(self) -> tuple[DeviceName, ...]:
        """Return the devices of this node."""
        return self._devices_of(self.nodes[0])

    @property
    def devices(self) -> tuple[DeviceName, ...]:
        """Return the devices of all nodes, node by node."""
        return tuple(device.on(node.name) for node in self.nodes for device in self._devices_of(node))

    def _devices_of(self, node: Found) -> tuple[DeviceName, ...]:
        words = of_node(node.name, self._wanted.devices) if node.devices is None else node.devices
        return tuple(map(DeviceName.parse, words))

    def _unusable(self, remarks: Sequence[Remark]) -> EnvironmentUnusableError:
        said = "; ".join(f"{one.node or 'here'}: {one.reason}" for one in remarks)
        remedy = next(
            (one.remedy for one in remarks if one.remedy), "name devices that a node has: --devices"
        )
        return EnvironmentUnusableError(f"no node can be used: {said}", remedy)

    def open(self, clock: Clock) -> RemoteNodes:
        """Listen for agents, if possible at the address that agents of an earlier scheduler know."""
        assert self._known is not None
        self._forget_transfers()  # of a scheduler that was killed
        keys = self._directory / KEYS
        if not keys.exists():
            curve.make(keys)
        addresses = {node.name: node.address for node in self.nodes}
        fresh = self._fresh_endpoint(addresses[""])
        former = "" if self._listen else self._known.endpoint
        for endpoint in filter(None, (former, fresh)):
            try:
                self._remote = RemoteNodes(
                    addresses,
                    endpoint,
                    keys,
                    clock,
                    lost_after_s=self._lost_after_s,
                    transfer=self.bring,
                    standby=(*_AGENTS, "standby", "ssh" if self._wanted.hosts else "ray"),
                )
                break
            except EnvironmentUnusableError:
                if endpoint == fresh:
                    raise
        assert self._remote is not None
        self._remote.judge, self._remote.absent = self.reports.judge, self.reports.absent
        self._known = replace(self._known, endpoint=self._remote.endpoint)
        server, own = curve.client_keys(keys)
        told = (self._remote.endpoint, server.decode(), own.public.decode(), own.secret.decode())
        self._agents = {
            node.name: Config(
                node.name,
                *told,
                gpus=any(one.kind == "cuda" for one in self._devices_of(node)),
                devices=tuple(map(str, self._devices_of(node))),
                working_directory=self._wanted.working_directory,
            )
            for node in self.nodes
            if node.name
        }
        return self._remote

    def _fresh_endpoint(self, own: str) -> str:
        """Return where to listen for agents if nothing is known of an earlier scheduler."""
        host, _, port = self._listen.rpartition(":")
        # By ssh, the nodes find out themselves by which address they reach this one.
        everywhere = "0.0.0.0" if self._wanted.hosts else own
        return f"tcp://{host or everywhere}:{port or '*'}"

    def begin(self, warn: Callable[[str], None], note: Callable[[Noted], object] = lambda note: None) -> None:
        """Start an agent on each node. If Ray cannot, go on with the agents that are there.

        A node on which none can be started is lost until one is there.

        Parameters
        ----------
        warn
            Called with what whoever started the scheduler should know.
        note
            Called with what is to be kept of it.

        Raises
        ------
        EnvironmentUnusableError
            If there is no node with devices, or Ray cannot do it, and no jobs are there that could go on
            without.
        """
        assert self._known is not None
        logs = identity(logs_directory(self._directory))  # set aside by now, if the journal is another
        self._agents = {name: replace(config, logs=logs) for name, config in self._agents.items()}
        self._write(self._known)
        self.reports.note = note
        self._tell(self.remarks, warn, note)
        try:
            begun = self._ask("begin", self._present())
        except EnvironmentUnusableError as error:
            if not has_unfinished_jobs(self._directory):
                raise
            warn(f"no agents could be started, those that run go on: {error.message}")
            return
        kept = {node.name for node in begun.nodes}
        own = [one for one in begun.remarks if not one.node]
        usable = any(device.node in kept for device in self.devices)
        if (own or not usable) and not has_unfinished_jobs(self._directory):
            self._ask("end", self._present(), _END_S)  # or other agents would wait for a scheduler
            raise self._unusable(own or begun.remarks)
        self._tell(begun.remarks, warn, note)
        self.remarks += begun.remarks
        self.reports.add(begun.remarks)
        assert self._remote is not None
        for node in self.nodes:
            if node.name not in kept and node.name:
                self._remote.give_up(node.name)
        self._remote.await_all()

    def _tell(
        self, remarks: Sequence[Remark], warn: Callable[[str], None], note: Callable[[Noted], object]
    ) -> None:
        """Tell people about nodes, now and in the events."""
        for one in remarks:
            warn(str(one))
            note(noted(one))

    def keep(self) -> None:
        """Start agents, from now on, on nodes that have lost theirs."""
        assert self._remote is not None
        self._revival = AgentRevival(self._revive, self._remote, self.reports)
        self._revival.start()

    def leave(self) -> None:
        """Start no more agents."""
        if self._revival is not None:
            self._revival.end(_LOGIN_S if self._wanted.hosts else 0.0)

    def _revive(self, names: Sequence[str], started: Started) -> Answer:
        nodes = tuple(node for node in self.nodes if node.name in ("", *names))
        wanted = replace(self._present(), nodes=nodes, patience_s=PATIENCE_S)
        return ask("begin", wanted, _BEGIN_S, self._say, started)

    def end(self, warn: Callable[[str], None]) -> None:
        """End what is left on the nodes of agents that were told to leave, and forget their keys."""
        try:
            ended = self._ask("end", self._present(), _END_S)
        except (EnvironmentUnusableError, UsageError) as error:
            warn(f"what is left of the agents could not be ended: {error.message}")
        else:
            for one in ended.remarks:
                warn(f"what is left of the agent of node {one.node} could not be ended: {one.reason}")
        self._forget_transfers()
        shutil.rmtree(self._directory / KEYS, ignore_errors=True)

    def _forget_transfers(self) -> None:
        """Remove what transfers were told that have not read it: keys are in it."""
        for path in (self._directory / "nodes").glob(_BRING.format("*")):
            path.unlink(missing_ok=True)

    def _present(self) -> Wanted:
        assert self._known is not None
        known = self._known
        return replace(self._wanted, nodes=known.nodes, agents=self._agents, endpoint=known.endpoint)

    def bring(self, job: str, sources: Sequence[str], targets: Sequence[str]) -> Sequence[str]:
        """Return the command that brings the newest snapshot of each rank of ``job`` to a node."""
        assert self._remote is not None
        nodes = tuple(node for node in self.nodes if node.name not in self._remote.lost)
        brought = {"sources": tuple(sources), "targets": tuple(targets)}
        wanted = replace(self._present(), nodes=nodes, **brought)
        path = self._directory / "nodes" / _BRING.format(job)  # that process removes it: keys are in it
        path.parent.mkdir(mode=0o700, exist_ok=True)
        replace_file(path, msgspec.json.encode(wanted))
        return [*_AGENTS, "bring", job, str(path)]

    def _ask(self, word: str, wanted: Wanted, limit_s: float = _BEGIN_S) -> Answer:
        """Ask Ray or ssh for something by a process of its own. Return the answer."""
        return ask(word, wanted, limit_s, self._say)

    def _read(self) -> Known | None:
        """Return what the last scheduler knew. Return None if all its jobs have ended."""
        known = read_known(self._directory)
        return known if has_unfinished_jobs(self._directory) else None

    def _write(self, known: Known) -> None:
        replace_file(self._directory / _FILE, msgspec.json.encode(known))


def read_known(directory: Path) -> Known | None:
    """Return the nodes of the last scheduler in ``directory``; None if it had none but its own.

    Raises
    ------
    EnvironmentUnusableError
        If the file with them is damaged.
    """
    try:
        return msgspec.json.decode((directory / _FILE).read_bytes(), type=Known)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise EnvironmentUnusableError(
            f"{directory / _FILE} is damaged: {error}", "remove it, or choose another --state-dir"
        ) from error


def hosts(nodes: Sequence[str], ray: str | None) -> tuple[Host, ...]:
    """Return the machines of ``up --node``, of which there may be several.

    Raises
    ------
    UsageError
        If one is none, is named twice, or ``--ray`` is given, too.
    """
    if nodes and ray is not None:
        raise UsageError("--node and --ray are both given", "choose one: a cluster of Ray has its own nodes")
    found = tuple(map(parse_host, nodes))
    names = [host.name for host in found]
    if double := next((name for name in names if names.count(name) > 1), ""):
        raise UsageError(f"two nodes are called {double}", "give each --node another name")
    return found


def listener(agent_port: str) -> str:
    """Return where agents are to connect by ``up --agent-port``. Raise ``UsageError`` if that is no port."""
    if agent_port:
        host, _, port = agent_port.rpartition(":")
        host_and_port(f"tcp://{host or '0.0.0.0'}:{port}")
    return agent_port


def refuse_without_nodes(replicate_every: int, without: Sequence[str], agent_port: str) -> None:
    """Raise ``UsageError`` for options of ``up`` that make no sense on one node."""
    asked = {"--replicate-every": replicate_every, "--without": without, "--agent-port": agent_port}
    for option, value in asked.items():
        if value:
            raise UsageError(f"{option} needs other nodes", "add --ray auto, or --node NAME=USER@HOST")
