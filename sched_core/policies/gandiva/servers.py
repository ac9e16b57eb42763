"""Which servers a job belongs to: affinity, over-subscription, defragmentation.

Source: Gandiva (OSDI 2018), sections 3.2 and 4.1. A job *belongs* to servers while it lives there; whether it
holds devices at a moment is decided by the slices.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import merge

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job

_FULL = 1.0 + 1e-9


class Server:
    """One node and the jobs that belong to it.

    Attributes
    ----------
    devices
        Those of the node that can be had.
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

    def __init__(self, node: int, devices: Sequence[int]) -> None:
        self.node = node
        self.devices = devices
        self.size = len(devices)
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
        self.all = [Server(node, cluster.on(node)) for node in range(len(cluster.node_sizes))]
        usable = [server for server in self.all if server.size]  # of a lost node nothing can be had
        self.homes: dict[str, list[Server]] = {}
        #: Those that are asked for more than they have, and those that have more than they are asked for.
        self.crowded: set[Server] = set()
        self.with_room = set(usable)
        #: By affinity, (load, node), the least loaded first; empty ones by 0.
        self._by_load: dict[int, list[tuple[float, int]]] = {0: [(0.0, server.node) for server in usable]}
        #: Servers whose jobs are no longer those that somebody last looked at.
        self.changed: set[Server] = set()
        #: Devices of the largest node, and whether all are as large.
        self.largest = max(cluster.node_sizes)
        self._alike = cluster.even
        self._node_of = cluster.node_of
        self._overload = overload

    def affinity(self, job: Job) -> int:
        """Return the size class of ``job``: 1, 2, 4, …, above a server the next whole number of servers."""
        if job.demand > self.largest:
            return -(-job.demand // self.largest) * self.largest
        size = 1
        while size < job.demand:
            size *= 2
        return min(size, self.largest)

    def find(self, job: Job) -> list[Server] | None:
        """Return a home for a new job by the paper's order. Return None if it has to queue."""
        if job.demand > self.largest:
            return None if job.within else self._several(job)
        kind = self.affinity(job)
        others = [affinity for affinity in self._by_load if affinity not in (0, kind)]
        for choice, limit in (([kind], 1.0), ([0], 1.0), ([kind], self._overload), (others, self._overload)):
            found = [server for affinity in choice if (server := self._least(job, affinity, limit))]
            if found:
                return [min(found, key=lambda server: (server.load, server.node))]
        return None

    def around(self, job: Job) -> list[Server] | None:
        """Return the servers that match the devices of a running job; None if none match."""
        held = Counter(self._node_of[device] for device in job.placement)
        left = job.demand
        for node, count in held.items():
            part = min(left, self.all[node].size)
            if count < part:
                return None
            left -= part
        return None if left else [self.all[node] for node in held]

    def empty(self, job: Job) -> Server | None:
        """Return the first server without jobs that could take ``job``."""
        return self._least(job, 0, 1.0)

    def roomy(self, job: Job, besides: Iterable[Server]) -> Server | None:
        """Return a server that takes ``job`` without over-subscription.

        Its affinity comes first, then the fullest.
        """
        shunned = {server.node for server in besides}
        fitting = [
            server
            for server in self.with_room
            if server.node not in shunned
            and server.parts
            and server.wanted + job.demand <= server.size
            and _can_host(server, job)
        ]
        kind = self.affinity(job)
        return min(fitting, key=lambda s: (s.affinity != kind, -s.wanted, s.node), default=None)

    def settle(self, job: Job, home: Sequence[Server], now_s: float) -> None:
        """Make ``home`` the job's servers, filled in this order."""
        left = job.demand
        for server in home:
            part = min(left, server.size)
            left -= part
            self._unlist(server)
            server.parts[job.id] = part
            server.wanted += part
            server.load += _load(job, part, server)
            server.affinity = server.affinity or self.affinity(job)
            server.changed_s = now_s
            self._list(server)
        self.homes[job.id] = list(home)
        self.changed.update(home)

    def leave(self, job: Job, now_s: float) -> None:
        """Remove ``job`` from its home."""
        for server in self.homes.pop(job.id, ()):
            self._unlist(server)
            part = server.parts.pop(job.id)
            server.wanted -= part
            server.load -= _load(job, part, server)
            self.changed.add(server)
            server.changed_s = now_s
            if not server.parts:
                server.affinity, server.load = 0, 0.0
            self._list(server)

    def together(self, servers: Iterable[Server]) -> dict[int, Server]:
        """Return ``servers`` and all servers that share jobs with them, directly or indirectly, by node."""
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

    def _list(self, server: Server) -> None:
        """Insert ``server`` into the lists by load."""
        insort(self._by_load.setdefault(server.affinity, []), (server.load, server.node))
        (self.crowded.add if server.wanted > server.size else self.crowded.discard)(server)
        (self.with_room.add if server.wanted < server.size else self.with_room.discard)(server)

    def _unlist(self, server: Server) -> None:
        """Remove ``server`` from the lists by load, before it changes."""
        alike = self._by_load[server.affinity]
        del alike[bisect_left(alike, (server.load, server.node))]

    def _least(self, job: Job, affinity: int, limit: float) -> Server | None:
        """Return the least loaded server of ``affinity`` that has room within ``limit``."""
        for load, node in self._by_load.get(affinity, ()):
            server = self.all[node]
            if server.parts and load + job.spec.weight * job.demand / self.largest > limit * _FULL:
                return None  # on none of the others it would be less
            if _can_host(server, job) and (
                not server.parts or load + job.spec.weight * job.demand / server.size <= limit * _FULL
            ):
                return server
        return None

    def _several(self, job: Job) -> list[Server] | None:
        """Return as few whole servers as hold ``job``: unassigned ones, else the least loaded."""
        chosen: list[Server] = []
        left = job.demand
        ranked: Iterable[Server] = (self.all[node] for _, node in merge(*self._by_load.values()))
        if not self._alike:
            ranked = sorted(ranked, key=lambda server: (server.load, -server.size, server.node))
        for server in ranked:
            part = min(left, server.size)
            if server.parts and server.load + _load(job, part, server) > self._overload * _FULL:
                return None
            chosen.append(server)
            left -= server.size
            if left <= 0:
                return chosen
        return None


def _can_host(server: Server, job: Job) -> bool:
    """Return True if ``server`` has enough devices that ``job`` may have."""
    if job.within and server.node not in job.within:
        return False
    closed = sum(device in job.closed for device in server.devices) if job.closed else 0
    return job.demand <= server.size - closed


def _load(job: Job, part: int, server: Server) -> float:
    return job.spec.weight * part / server.size
