"""Which servers a job belongs to: affinity, over-subscription, defragmentation.

Source: Gandiva (OSDI 2018), sections 3.2 and 4.1. A job *belongs* to servers while it lives there; whether it
holds devices at a moment is decided by the slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job

_FULL = 1.0 + 1e-9


class Server:
    """One node and the jobs that belong to it.

    Attributes
    ----------
    affinity
        Class of job sizes it is for; 0 while nobody belongs to it.
    parts
        Devices wanted here, by job id.
    wanted
        Devices wanted by all who belong here.
    load
        Σ weight × devices wanted / devices.
    changed_s
        When a job last came or went.
    """

    def __init__(self, node: int, size: int) -> None:
        self.node = node
        self.size = size
        self.affinity = 0
        self.parts: dict[str, int] = {}
        self.wanted = 0
        self.load = 0.0
        self.changed_s = 0.0


class Servers:
    """All servers, and the home of every job.

    Parameters
    ----------
    overload
        How loaded over-subscription may make a server.
    """

    def __init__(self, cluster: Cluster, overload: float) -> None:
        self.all = [Server(node, size) for node, size in enumerate(cluster.node_sizes) if size]
        self.homes: dict[str, list[Server]] = {}
        #: Servers whose jobs are no longer those that somebody last looked at.
        self.changed: set[Server] = set()
        #: Devices of the largest node.
        self.largest = max(cluster.node_sizes)
        self._overload = overload

    def affinity(self, job: Job) -> int:
        """1, 2, 4, … for jobs within a server; above that the next whole number of servers' devices."""
        if job.demand > self.largest:
            return -(-job.demand // self.largest) * self.largest
        size = 1
        while size < job.demand:
            size *= 2
        return min(size, self.largest)

    def find(self, job: Job) -> list[Server] | None:
        """A home for a new job, by the paper's order; ``None``: it has to queue."""
        if job.demand > self.largest:
            return self._several(job)
        kind = self.affinity(job)
        same = [server for server in self.all if server.affinity == kind]
        empty = [server for server in self.all if not server.parts]
        other = [server for server in self.all if server.parts and server.affinity != kind]
        for choice, limit in ((same, 1.0), (empty, 1.0), (same, self._overload), (other, self._overload)):
            home = self._least(job, choice, limit)
            if home is not None:
                return [home]
        return None

    def roomy(self, job: Job, besides: Iterable[Server]) -> Server | None:
        """A server that takes ``job`` without over-subscription: of its affinity first, then the fullest."""
        shunned = {server.node for server in besides}
        fitting = [
            server
            for server in self.all
            if server.node not in shunned and server.parts and server.wanted + job.demand <= server.size
        ]
        kind = self.affinity(job)
        return min(fitting, key=lambda s: (s.affinity != kind, -s.wanted, s.node), default=None)

    def settle(self, job: Job, home: Sequence[Server], now_s: float) -> None:
        """Let ``job`` belong to ``home``, filled in this order."""
        left = job.demand
        for server in home:
            part = min(left, server.size)
            left -= part
            server.parts[job.id] = part
            server.wanted += part
            server.load += _load(job, part, server)
            server.affinity = server.affinity or self.affinity(job)
            server.changed_s = now_s
        self.homes[job.id] = list(home)
        self.changed.update(home)

    def leave(self, job: Job, now_s: float) -> None:
        """``job`` belongs nowhere any more."""
        for server in self.homes.pop(job.id, ()):
            part = server.parts.pop(job.id)
            server.wanted -= part
            server.load -= _load(job, part, server)
            self.changed.add(server)
            server.changed_s = now_s
            if not server.parts:
                server.affinity, server.load = 0, 0.0

    def together(self, servers: Iterable[Server]) -> dict[int, Server]:
        """``servers`` and those that they share jobs with, directly or not, by node."""
        found = {server.node: server for server in servers}
        reached = list(found.values())
        while reached:
            for name in reached.pop().parts:
                home = self.homes[name]
                if len(home) > 1:
                    more = [server for server in home if server.node not in found]
                    found.update((server.node, server) for server in more)
                    reached += more
        return found

    def _least(self, job: Job, servers: Iterable[Server], limit: float) -> Server | None:
        """The least loaded of ``servers`` that stays within ``limit``."""
        fitting = [
            server
            for server in servers
            if job.demand <= server.size
            and (
                server.load + job.spec.weight * job.demand / server.size <= limit * _FULL or not server.parts
            )
        ]
        return min(fitting, key=lambda server: (server.load, server.node), default=None)

    def _several(self, job: Job) -> list[Server] | None:
        """As few whole servers as hold ``job``: unassigned ones, else the least loaded."""
        chosen: list[Server] = []
        left = job.demand
        for server in sorted(self.all, key=lambda server: (server.load, -server.size, server.node)):
            part = min(left, server.size)
            if server.parts and server.load + _load(job, part, server) > self._overload * _FULL:
                return None
            chosen.append(server)
            left -= server.size
            if left <= 0:
                return chosen
        return None


def _load(job: Job, part: int, server: Server) -> float:
    return job.spec.weight * part / server.size
