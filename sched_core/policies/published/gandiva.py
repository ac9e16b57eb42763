"""``gandiva`` as the simulator published with Tiresias computes it, mistakes included (docs/simulate.md)."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, floor

from gpuslice.errors import ConfigError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.policies.target import difference
from gpuslice.sched_core.policy import Plan, View

#: Numbers of devices that the peer knows, in the order in which it walks them: that of its dictionary.
SIZES = (16, 1, 2, 4, 24, 32, 8, 64, 12)
#: Time between two looks, and how often those that wait in a node set get their turn.
TICK_S, TURN_S = 10, 60


class NodeSet:
    """Nodes on which jobs of one size take turns.

    Attributes
    ----------
    nodes
        Their numbers.
    capacity
        How many of the jobs run at once: the first ones of ``jobs``.
    load
        Jobs that came since the last rearrangement; those that ended meanwhile still count.
    """

    def __init__(self, nodes: list[int], capacity: int) -> None:
        self.nodes = nodes
        self.capacity = capacity
        self.load = 0
        self.jobs: list[Job] = []

    def add(self, job: Job) -> None:
        """Append ``job`` to those that take turns here."""
        self.load += 1
        self.jobs.append(job)


class PublishedGandiva:
    """Jobs of one size share node sets; sizes get nodes in proportion to what their jobs ask for.

    Every tick: what ended leaves, at full minutes those that ran go to the end of their node set, new jobs
    join, node sets are added to a size or taken from it. Ticks that change nothing are left out.

    Attributes
    ----------
    joined_s
        When each job joined a node set, by its number: what the peer calls its start.
    """

    name = "published-gandiva"
    needs_durations = False
    #: What ``_picture`` showed at the end of the last tick, if it was asked.
    _seen: object = None

    def plan(self, view: View) -> Plan:
        """Return the plan of one tick."""
        if view.changes.reset:
            self._reset(view.cluster)
        before = self._picture() if self._seen is None else self._seen
        gone = {job.id for job in view.changes.finished}
        came = list(view.jobs.values()) if view.changes.reset else view.changes.arrived
        turned, released = self._end(gone, turn=view.now_s % TURN_S == 0)
        for job in came:
            if not self._join(job, view.now_s):
                self._pending.append(job)
        if released:
            self._retry(view.now_s)
        self._adjust(view.cluster.size)
        # Nothing changes between two ticks, so what one leaves is what the next one finds.
        self._seen = None if gone or came or turned else self._picture()
        quiet = self._seen is not None and self._seen == before
        return Plan(
            difference(view.jobs.values(), self._target(view.cluster)), self._wake_at(view, quiet=quiet)
        )

    def _reset(self, cluster: Cluster) -> None:
        self._node_size = max(cluster.node_sizes)
        if not cluster.even:
            raise ConfigError(f"tiresias:gandiva has nodes of one size, not {cluster}", "write NODESxDEVICES")
        self._free = [node for node, size in enumerate(cluster.node_sizes) if size]
        self._sets: dict[int, list[NodeSet]] = {size: [] for size in SIZES}
        self._pending: list[Job] = []
        self._seen = None
        self.joined_s: dict[int, float] = {}

    def _picture(self) -> object:
        """Return a copy of everything that decides the next tick, to see whether it changes."""
        return (
            [
                (len(one.nodes), one.load, [job.id for job in one.jobs])
                for group in self._sets.values()
                for one in group
            ],
            [job.id for job in self._pending],
        )

    def _end(self, gone: set[str], *, turn: bool) -> tuple[bool, bool]:
        """Give turns and remove ended jobs. Return whether a turn was over, and whether nodes became free."""
        turned = released = False
        for group in self._sets.values():
            for one in list(group):
                if turn and len(one.jobs) > one.capacity:
                    one.jobs = one.jobs[one.capacity :] + one.jobs[: one.capacity]
                    turned = True
                one.jobs = [job for job in one.jobs if job.id not in gone]
                if not one.jobs:
                    self._free += one.nodes
                    group.remove(one)
                    released = True
        return turned, released

    def _join(self, job: Job, now_s: float) -> bool:
        """Find a node set for ``job``. Return False if it has to wait."""
        if job.demand not in self._sets:
            known = ", ".join(map(str, sorted(SIZES)))
            raise ConfigError(
                f"job {job.id} asks for {job.demand} devices; tiresias:gandiva knows {known}",
                "leave out such jobs",
            )
        group = self._sets[job.demand]
        if group:
            # The first one is tried; refused, it goes to the end of the list.
            group.append(group.pop(0))
        if not group or group[-1].load + 1 >= group[-1].capacity:
            if self._nodes_for(job.demand) <= len(self._free):
                group.append(self._new_set(job.demand))
            elif group:
                group.append(group.pop(0))
            else:
                return False
        group[-1].add(job)
        group.sort(key=_load)
        self.joined_s[job.number] = now_s
        return True

    def _retry(self, now_s: float) -> None:
        # Whoever follows one that joins is passed over: the list is walked while jobs are taken out of it.
        position = 0
        while position < len(self._pending):
            if self._join(self._pending[position], now_s):
                del self._pending[position]
            position += 1

    def _nodes_for(self, size: int) -> int:
        return ceil(size / self._node_size)

    def _new_set(self, size: int) -> NodeSet:
        count = self._nodes_for(size)
        nodes, self._free = self._free[:count], self._free[count:]
        return NodeSet(nodes, count * self._node_size // size)

    def _adjust(self, devices: int) -> None:
        """Give every size node sets in proportion to what its jobs ask for."""
        asked = {
            size: size * sum([len(one.jobs) for one in group]) for size, group in self._sets.items() if group
        }
        total = sum(asked.values())
        for size, wanted in asked.items():
            if wanted:
                group = self._sets[size]
                # A size gets and gives node sets only here, so what it has is not changed by others.
                has = self._node_size * sum([len(one.nodes) for one in group])
                more = min(floor(wanted / total * devices), wanted) - has
                if more > 0:
                    self._expand(size, group, ceil(more / size))
                elif more < 0:
                    self._shrink(group, ceil(-more / size))

    def _expand(self, size: int, group: list[NodeSet], count: int) -> None:
        rearranged = 0
        for number in range(1, count + 1):
            rearranged = number
            if self._nodes_for(size) <= len(self._free):
                group.append(self._new_set(size))
                # The peer counts the nodes of a set with the variable that counts sets.
                rearranged = self._nodes_for(size) - 1
        if rearranged:
            jobs = [job for one in group for job in one.jobs]
            for one in group:
                if one.jobs:
                    one.jobs, one.load = [], 0
            _hand_out(jobs, group)

    def _shrink(self, group: list[NodeSet], count: int) -> None:
        """Dissolve the first ``count`` node sets, keeping at least one."""
        taken = group[: min(count, len(group) - 1)]
        del group[: len(taken)]
        self._free += [node for one in taken for node in one.nodes]
        _hand_out([job for one in taken for job in one.jobs], group)

    def _target(self, cluster: Cluster) -> dict[str, tuple[int, ...]]:
        """Return the devices of the jobs whose turn it is.

        A job that has devices on its node set keeps them.
        """
        target: dict[str, tuple[int, ...]] = {}
        for size, group in self._sets.items():
            for one in group:
                first = [node * self._node_size for node in one.nodes]
                pool = [device for start in first for device in range(start, start + self._node_size)]
                running = one.jobs[: one.capacity]
                for job in running:
                    if job.running and set(job.placement) <= set(pool):
                        target[job.id] = job.placement
                        pool = [device for device in pool if device not in job.placement]
                for job in running:
                    if job.id not in target:
                        target[job.id] = tuple(pool[:size])
                        del pool[:size]
        return target

    def _wake_at(self, view: View, *, quiet: bool) -> float | None:
        """Return the next tick.

        If nothing changes from tick to tick, return the next one that gives turns.
        """
        if not view.jobs:
            return None
        if not quiet:
            return view.now_s + TICK_S
        waiting = any(len(one.jobs) > one.capacity for group in self._sets.values() for one in group)
        if not waiting or view.now_s % TICK_S:
            return None
        return view.now_s + TURN_S - view.now_s % TURN_S


def _hand_out(jobs: Iterable[Job], group: list[NodeSet]) -> None:
    """Give each job to the least loaded node set, one by one."""
    group_is_sorted = False
    for job in jobs:
        group[0].add(job)
        if group_is_sorted and (len(group) == 1 or group[0].load <= group[1].load):
            continue
        group.sort(key=_load)
        group_is_sorted = True


def _load(one: NodeSet) -> int:
    return one.load
