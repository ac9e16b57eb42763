"""Gandiva as a policy: slices on every server, and now and then a look at what could be better."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import floor
from typing import Literal

from gpuslice.errors import ConfigError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.policies.starting import parse_shares
from gpuslice.sched_core.policy import Decision, Migrate, Plan, Start, Suspend, View

from .packing import Packing
from .servers import Server, Servers

#: Devices that nobody has in this slice, by node, ascending.
Free = dict[int, list[int]]
#: What a job asks for: devices, weight, whether on one node, and what is closed to it.
Kind = tuple[int, float, bool, frozenset[int]]


class Gandiva:
    """Early feedback for all by time slices on over-subscribed servers (OSDI 2018).

    A job belongs to a server of its affinity. On a server that is asked for more than it has, jobs take
    turns: at every multiple of ``quantum_s`` those that have had the least time for their weight run. There
    is no fairness between servers.

    Parameters
    ----------
    quantum_s
        Length of a slice (section 4.1: about a minute).
    mode
        ``reactive``: acts on arrivals and departures only; ``introspective``: also tries every ``look_s`` to
        pack, migrate, defragment and grow.
    look_s
        Time between looks, and running time after which a packed pair is judged.
    overload
        How loaded over-subscription may make a server; beyond, jobs queue.
    packing, migration, growing
        True if these are used. Packing needs a world that measures how packed jobs get along
        (``View.measures_rates``).
    gain
        Packed jobs stay together if they make more than ``gain`` times the progress of taking turns.
    utilization
        ``model:share`` pairs as measured; packing begins with the least. Unknown models count as 1.

    Attributes
    ----------
    counters
        Pairs kept and undone, jobs moved for balance and to empty a server, jobs grown.
    """

    name = "gandiva"
    needs_durations = False

    def __init__(
        self,
        *,
        quantum_s: float = 60.0,
        mode: Literal["introspective", "reactive"] = "introspective",
        look_s: float = 300.0,
        overload: float = 4.0,
        packing: bool = True,
        migration: bool = True,
        growing: bool = True,
        gain: float = 1.05,
        utilization: str = "",
    ) -> None:
        if not quantum_s > 0 or not look_s > 0 or not overload >= 1:
            raise ConfigError(
                f"quantum_s={quantum_s}, look_s={look_s}, overload={overload} are not possible",
                "times must be positive and overload at least 1",
            )
        self._quantum_s = quantum_s
        self._look_s = look_s
        self._overload = overload
        self._looks = mode == "introspective"
        self._packs = packing and self._looks
        self._migrates = migration
        self._grows = growing and self._looks
        self._gain = gain
        self._utilization = parse_shares(utilization, "utilization")
        self._clear(Cluster((1,)), 0.0)

    def _clear(self, cluster: Cluster, now_s: float) -> None:
        self._servers = Servers(cluster, self._overload)
        self._packing = Packing(self._gain, self._look_s)
        self._counts = {"moved": 0, "emptied": 0, "grown": 0}
        #: Those without a home, by what they ask for, in order of arrival.
        self._queue: dict[Kind, dict[str, Job]] = {}
        #: Added to executed time / weight: where a job stands in the turns of its server.
        self._head_start_s: dict[str, float] = {}
        self._sharing: set[str] = set()
        #: Who has the slice, and who may ask for more devices when they are idle.
        self._turning: set[str] = set()
        self._elastic: dict[str, Job] = {}
        self._slice_end_s: float | None = None
        self._next_look_s = now_s + self._look_s

    @property
    def counters(self) -> dict[str, int]:
        """Return the numbers of moves, growths and packings."""
        return {**self._counts, "packings_kept": self._packing.kept, "packings_undone": self._packing.undone}

    def plan(self, view: View) -> Plan:
        """Assign servers to new jobs, move jobs, and give the slice to the jobs whose turn it is."""
        departed = self._follow(view)
        now_s = view.now_s
        self._assign_servers(view)
        if departed and self._migrates:
            self._balance(view)
        if self._looks and now_s >= self._next_look_s:
            self._look(view)
        slice_is_over = self._slice_end_s is None or now_s >= self._slice_end_s
        servers = self._unreconciled(slice_is_over)
        units = self._units(view, servers)
        free = {node: list(view.cluster.on(node)) for node in servers}
        target = self._turns(view, free, units, rotate=slice_is_over)
        self._grow(view, free, target)
        decisions = self._differences(view, [job for unit in units for job in unit], target)
        crowded = len(self._turning) < len(self._servers.homes)
        slice_s = view.slice_s(self._quantum_s)
        self._slice_end_s = (floor(now_s / slice_s) + 1) * slice_s if crowded else None
        return Plan(decisions, self._wake_at(view))

    def _unreconciled(self, slice_is_over: bool) -> dict[int, Server]:
        """Return the servers, by node, on which other jobs may get their turn now."""
        found = set(self._servers.changed)
        self._servers.changed.clear()
        if slice_is_over:
            found |= self._servers.crowded
        for name in self._elastic:
            found.update(self._servers.homes.get(name, ()))
        return self._servers.together(found)

    def _follow(self, view: View) -> bool:
        """Note which jobs came and ended. Return True if a job ended."""
        if view.changes.reset:
            self._clear(view.cluster, view.now_s)
        for job in view.changes.finished:
            self._unqueue(job)
            self._packing.forget(job)
            self._sharing.discard(job.id)
            self._turning.discard(job.id)
            self._elastic.pop(job.id, None)
            self._servers.leave(job, view.now_s)
            self._head_start_s.pop(job.id, None)
        # After a reset, those that run find their homes where they are.
        homes = {job.id: self._servers.around(job) for job in view.running()} if view.changes.reset else {}
        for job in view.jobs.values() if view.changes.reset else view.changes.arrived:
            if home := homes.get(job.id):
                self._enter(job, home, view)
            else:
                self._queue.setdefault(_kind(job), {})[job.id] = job
            if job.spec.most_devices > job.demand:
                self._elastic[job.id] = job
        return bool(view.changes.finished)

    def _assign_servers(self, view: View) -> None:
        """Find homes for queued jobs, in order of arrival."""
        # Servers only fill up here: where one job of a kind found no home, the next will not either.
        lines = dict(self._queue)
        while lines:
            kind, job = min(
                ((kind, next(iter(line.values()))) for kind, line in lines.items()),
                key=lambda head: head[1].number,
            )
            home = self._servers.find(job)
            if home is not None:
                self._unqueue(job)
                self._enter(job, home, view)
            if home is None or kind not in self._queue:
                del lines[kind]

    def _unqueue(self, job: Job) -> None:
        line = self._queue.get(_kind(job), {})
        line.pop(job.id, None)
        if not line:
            self._queue.pop(_kind(job), None)

    def _enter(self, job: Job, home: list[Server], view: View) -> None:
        others = [view.jobs[name] for server in home for name in server.parts]
        behind_s = min((self._turn_s(other, view) for other in others), default=0.0)
        self._head_start_s[job.id] = behind_s - job.executed_at(view.now_s) / job.spec.weight
        self._servers.settle(job, home, view.now_s)

    def _turn_s(self, job: Job, view: View) -> float:
        return self._head_start_s[job.id] + job.executed_at(view.now_s) / job.spec.weight

    def _balance(self, view: View) -> None:
        """Move jobs from over-subscribed servers to servers with room."""
        # Room that a job leaves behind is too small for any size that found none before.
        stuck: set[int] = set()
        crowded = self._servers.crowded if self._servers.with_room else ()
        for server in sorted(crowded, key=lambda server: (-server.load, server.node)):
            if not self._servers.with_room:
                return
            for name in sorted(server.parts, key=lambda name: (view.jobs[name].running, -server.parts[name])):
                if server.wanted <= server.size:
                    break
                job = view.jobs[name]
                if job.demand not in stuck and not self._move(job, view, empty_too=True):
                    stuck.add(job.demand)

    def _move(self, job: Job, view: View, *, empty_too: bool) -> bool:
        home = self._servers.homes[job.id]
        if len(home) > 1:
            return False
        target = self._servers.roomy(job, home)
        if target is None and empty_too:
            target = self._servers.empty(job)
        if target is None:
            return False
        self._packing.forget(job)
        self._servers.leave(job, view.now_s)
        self._enter(job, [target], view)
        self._counts["moved"] += 1
        return True

    def _look(self, view: View) -> None:
        """Look for improvements: pack jobs that take turns, and empty a server for a queued job."""
        self._next_look_s = (floor(view.now_s / self._look_s) + 1) * self._look_s
        if self._packs and view.measures_rates:
            for guest in self._packing.judge(view):
                self._servers.changed.update(self._servers.homes[guest])
            for server in self._servers.all:
                if server.wanted > server.size:
                    here = [view.jobs[name] for name in server.parts if len(self._servers.homes[name]) == 1]
                    if self._packing.propose(here, self._utilization, view):
                        self._servers.changed.add(server)
        if self._migrates:
            self._balance(view)
            if self._queue:
                self._defragment(view)

    def _defragment(self, view: View) -> None:
        """Empty the server with most free devices into fuller ones, if all of its jobs fit there."""
        partly = [server for server in self._servers.all if 0 < server.wanted < server.size]
        if len(partly) < 2:
            return
        server = max(partly, key=lambda server: (server.size - server.wanted, server.node))
        room = sum(other.size - other.wanted for other in partly) - (server.size - server.wanted)
        if room >= server.wanted:
            moved = [self._move(view.jobs[name], view, empty_too=False) for name in list(server.parts)]
            self._counts["emptied"] += all(moved)

    def _units(self, view: View, servers: Mapping[int, Server]) -> list[list[Job]]:
        """Return groups of jobs that run together (a host and its guest, or one job), least time first."""
        guest_of = {host: guest for guest, host in self._packing.host_of.items()}
        units = [
            [view.jobs[name], *([view.jobs[guest_of[name]]] if name in guest_of else [])]
            for node, server in servers.items()
            for name in server.parts
            if self._servers.homes[name][0].node == node and name not in self._packing.host_of
        ]
        units.sort(key=lambda unit: min((self._turn_s(job, view), job.number) for job in unit))
        return units

    def _turns(
        self, view: View, free: Free, units: Iterable[list[Job]], *, rotate: bool
    ) -> dict[str, tuple[int, ...]]:
        """Return the devices of the jobs that have this slice.

        Without ``rotate`` those that have it keep it.
        """
        target: dict[str, tuple[int, ...]] = {}
        ranked = list(units)
        if not rotate:
            ranked.sort(key=lambda unit: not unit[0].running)
        if any(job.closed for unit in ranked for job in unit):
            return self._turns_where_open(free, ranked)
        left = {node: len(devices) for node, devices in free.items()}
        chosen: list[list[Job]] = []
        for unit in ranked:
            parts = self._parts(unit[0])
            if all(left[node] >= part for node, part in parts):
                chosen.append(unit)
                left.update((node, left[node] - part) for node, part in parts)
        # Devices of a server are alike: whoever runs on some and goes on running keeps them.
        chosen.sort(key=lambda unit: not unit[0].running)
        for unit in chosen:
            devices = self._devices(unit[0], free)
            for job in unit:
                target[job.id] = devices
        return target

    def _turns_where_open(self, free: Free, ranked: list[list[Job]]) -> dict[str, tuple[int, ...]]:
        """Return the devices of the jobs that have this slice, if some devices are closed to some of them.

        A job has first what is closed to most others.
        """
        target: dict[str, tuple[int, ...]] = {}
        closed = Counter(device for unit in ranked for job in unit for device in job.closed)
        for unit in ranked:
            found: list[int] = []
            for node, part in self._parts(unit[0]):
                open_to_it = [one for one in free[node] if all(job.may_have((one,)) for job in unit)]
                open_to_it.sort(key=lambda one: (-closed[one], one not in unit[0].placement))
                found += open_to_it[:part]
            if len(found) == sum(part for _, part in self._parts(unit[0])):
                found.sort(key=lambda one: unit[0].placement.index(one) if one in unit[0].placement else one)
                target.update((job.id, tuple(found)) for job in unit)
                for devices in free.values():
                    devices[:] = [one for one in devices if one not in found]
        return target

    def _parts(self, job: Job) -> list[tuple[int, int]]:
        """Return the nodes of ``job``, and how many devices of each it uses when it has its turn."""
        return [(server.node, server.parts[job.id]) for server in self._servers.homes[job.id]]

    def _devices(self, job: Job, free: Free) -> tuple[int, ...]:
        """Take devices from ``free`` for ``job``: those that it held last, if possible."""
        devices: list[int] = []
        for node, part in self._parts(job):
            devices += _take(part, free[node], job.placement)
        return tuple(devices)

    def _grow(self, view: View, free: Free, target: dict[str, tuple[int, ...]]) -> None:
        """Give idle devices of servers that have been quiet for a while to their elastic jobs."""
        if not self._grows:
            return
        pairs = self._packing.paired
        for name, devices in target.items():
            job, home = view.jobs[name], self._servers.homes[name]
            extra = min(job.spec.most_devices - job.demand, len(free[home[0].node]))
            quiet = view.now_s >= home[0].changed_s + self._look_s
            if extra <= 0 or len(home) > 1 or name in pairs or not quiet or job.closed:
                continue
            more = _take(extra, free[home[0].node], job.placement)
            self._counts["grown"] += len(devices) + len(more) > len(job.placement)
            target[name] = (*devices, *more)

    def _differences(
        self, view: View, jobs: Iterable[Job], target: Mapping[str, tuple[int, ...]]
    ) -> list[Decision]:
        """Return decisions after which exactly the jobs in ``target`` run, in order of arrival."""
        pairs = self._packing.paired
        decisions: list[Decision] = []
        for job in sorted(jobs, key=lambda job: job.number):
            devices = target.get(job.id)
            if devices is None:
                self._turning.discard(job.id)
                if job.running:
                    decisions.append(Suspend(job.id))
                    self._sharing.discard(job.id)
                continue
            self._turning.add(job.id)
            shared = job.id in pairs
            if not job.running:
                decisions.append(Start(job.id, devices, shared))
            elif devices != job.placement or (shared and job.id not in self._sharing):
                decisions.append(Migrate(job.id, devices, shared))
            else:
                continue
            (self._sharing.add if shared else self._sharing.discard)(job.id)
        return decisions

    def _wake_at(self, view: View) -> float | None:
        """Return when to plan again: the end of the slice, or the next look.

        The slice counts if jobs take turns, the look if there is something to look at.
        """
        times = [] if self._slice_end_s is None else [self._slice_end_s]
        restless = self._slice_end_s is not None or self._queue or self._packing.trying
        may_grow = self._grows and any(
            len(job.placement) < job.spec.most_devices for job in self._elastic.values()
        )
        if self._looks and (restless or may_grow):
            self._next_look_s = max(self._next_look_s, (floor(view.now_s / self._look_s) + 1) * self._look_s)
            times.append(self._next_look_s)
        return min(times, default=None)


def _take(count: int, free: list[int], rather: Iterable[int]) -> list[int]:
    """Remove ``count`` devices from ``free`` and return them, those of ``rather`` first."""
    own = [device for device in rather if device in free]
    taken = (own + [device for device in free if device not in own])[:count]
    free[:] = [device for device in free if device not in taken]
    return taken


def _kind(job: Job) -> Kind:
    """Return the properties of a job that decide whether a server takes it.

    Jobs of one kind find a home or none alike.
    """
    return job.demand, job.spec.weight, bool(job.within), job.closed
