"""The other nodes of a scheduler that was started with ``--ray``: found and given agents by Ray.

What Ray is asked for is asked by a process of its own (``gpuslice.nodes.agents``). So nothing here imports
Ray, and the scheduler goes on when Ray does not. The talk with the agents is ours.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuslice.clock import Clock
from gpuslice.config import load
from gpuslice.daemon.journal_recovery import has_unfinished_jobs
from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.files import private_directory, replace_file
from gpuslice.nodes.plan import Config, Found, Wanted
from gpuslice.sched_core.nodes import curve
from gpuslice.sched_core.nodes.endpoint import logs_directory
from gpuslice.sched_core.nodes.node_logs import identity
from gpuslice.sched_core.nodes.remote_nodes import LOST_AFTER_S, RemoteNodes
from gpuslice.types import DeviceName, Word

#: Names in the scheduler's directory.
_FILE, _KEYS = "nodes.json", "node-keys"
_EXIT_USAGE = 2


class _Known(msgspec.Struct, frozen=True):
    """The facts that the next scheduler needs to go on with jobs on other nodes."""

    nodes: tuple[Found, ...]
    endpoint: Word


class OtherNodes:
    """The nodes of a cluster, of which this one is the first.

    Parameters
    ----------
    directory
        The scheduler's.
    address
        ``auto``, or that of the cluster's head.
    devices
        What is shared on each node.
    lost_after_s
        When a node counts as lost of which nothing is heard.
    replicate_every
        One of so many snapshots is copied to another node; 0: none.

    Raises
    ------
    EnvironmentUnusableError
        If there is no Ray, or no cluster.
    """

    def __init__(
        self,
        directory: Path,
        address: str,
        devices: Sequence[DeviceName],
        *,
        lost_after_s: float = LOST_AFTER_S,
        replicate_every: int = 0,
    ) -> None:
        private_directory(directory, option="--state-dir", parents=True, by_link=True)
        self._directory = directory
        self._address = "" if address == "auto" else address
        self._local = tuple(devices)
        self._lost_after_s = lost_after_s
        self.replicate_every = replicate_every
        self._remote: RemoteNodes | None = None
        self._agents: dict[str, Config] = {}
        self._known = self._read()
        if self._known is None:
            found = self._ask("find", Wanted(address=self._address))
            self._known = _Known(msgspec.json.decode(found, type=tuple[Found, ...]), "")

    @property
    def nodes(self) -> tuple[Found, ...]:
        """Return all nodes, this one first."""
        assert self._known is not None
        return self._known.nodes

    @property
    def devices(self) -> tuple[DeviceName, ...]:
        """Return the devices of all nodes, node by node."""
        return tuple(device.on(node.name) for node in self.nodes for device in self._local)

    def open(self, clock: Clock) -> RemoteNodes:
        """Listen for agents, if possible at the address that agents of an earlier scheduler know."""
        assert self._known is not None
        keys = self._directory / _KEYS
        if not keys.exists():
            curve.make(keys)
        addresses = {node.name: node.address for node in self.nodes}
        fresh = f"tcp://{addresses['']}:*"
        for endpoint in filter(None, (self._known.endpoint, fresh)):
            try:
                self._remote = RemoteNodes(
                    addresses,
                    endpoint,
                    keys,
                    clock,
                    lost_after_s=self._lost_after_s,
                    transfer=self.bring,
                )
                break
            except EnvironmentUnusableError:
                if endpoint == fresh:
                    raise
        assert self._remote is not None
        self._known = _Known(self.nodes, self._remote.endpoint)
        server, own = curve.client_keys(keys)
        told = (self._remote.endpoint, server.decode(), own.public.decode(), own.secret.decode())
        names = [node.name for node in self.nodes if node.name]
        self._agents = {name: Config(name, *told, gpus=bool(self._gpus)) for name in names}
        return self._remote

    def begin(self, warn: Callable[[str], None]) -> None:
        """Start an agent on each node by Ray. If Ray cannot, go on with the agents that are there.

        Raises
        ------
        EnvironmentUnusableError
            If Ray cannot do it, and no jobs are there that could go on without.
        """
        assert self._known is not None
        logs = identity(logs_directory(self._directory))  # set aside by now, if the journal is another
        self._agents = {name: replace(config, logs=logs) for name, config in self._agents.items()}
        self._write(self._known)
        try:
            self._ask("begin", self._wanted())
        except EnvironmentUnusableError as error:
            if not has_unfinished_jobs(self._directory):
                raise
            warn(f"no agents could be started, those that run go on: {error.message}")

    def end(self, warn: Callable[[str], None]) -> None:
        """Give Ray its devices back. The scheduler tells the agents to leave."""
        try:
            self._ask("end", self._wanted())
        except (EnvironmentUnusableError, UsageError) as error:
            warn(f"Ray's actors on the nodes could not be ended: {error.message}")

    def _wanted(self) -> Wanted:
        return Wanted(
            address=self._address,
            nodes=self.nodes,
            directory=str(self._directory),
            agents=self._agents,
            gpus=self._gpus,
            cpus=0 if self._gpus else -1,
            ramdisk_dir=load().ramdisk_dir,
        )

    @property
    def _gpus(self) -> int:
        return sum(device.kind == "cuda" for device in self._local)

    def bring(self, job: str, sources: Sequence[str], targets: Sequence[str]) -> Sequence[str]:
        """Return the command that brings the newest snapshot of each rank of ``job`` to a node."""
        assert self._remote is not None
        nodes = tuple(node for node in self.nodes if node.name not in self._remote.lost)
        brought = {"sources": tuple(sources), "targets": tuple(targets)}
        wanted = replace(self._wanted(), nodes=nodes, **brought)
        path = self._directory / "nodes" / f"bring-{job}.json"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(msgspec.json.encode(wanted))
        return [sys.executable, "-m", "gpuslice.nodes.agents", "bring", job, str(path)]

    def _ask(self, word: str, wanted: Wanted) -> bytes:
        """Have Ray do something, in a process of its own. Return what that process prints."""
        process = subprocess.run(
            [sys.executable, "-m", "gpuslice.nodes.agents", word],
            input=msgspec.json.encode(wanted),
            capture_output=True,
            check=False,
        )
        if process.returncode == 0:
            return process.stdout
        lines = process.stderr.decode(errors="replace").strip().splitlines()[-2:] or ["it said nothing"]
        kind = UsageError if process.returncode == _EXIT_USAGE else EnvironmentUnusableError
        raise kind(lines[0], "".join(lines[1:]))

    def _read(self) -> _Known | None:
        """Return what the last scheduler knew. Return None if all its jobs have ended."""
        try:
            known = msgspec.json.decode((self._directory / _FILE).read_bytes(), type=_Known)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise EnvironmentUnusableError(
                f"{self._directory / _FILE} is damaged: {error}", "remove it, or choose another --state-dir"
            ) from error
        return known if has_unfinished_jobs(self._directory) else None

    def _write(self, known: _Known) -> None:
        replace_file(self._directory / _FILE, msgspec.json.encode(known))
