"""The agent of one app: works out its finish-time fairness and answers offers with bids.

Source: Themis (NSDI 2020), sections 3.2 and 4.3. An agent sees only the offer made to it (pessimistic), while
the arbiter may make the same offer to several agents at once (optimistic).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, nan
from typing import Literal

from gpuslice.sched_core.cluster import Cluster, FreeDevices
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.policy import View
from gpuslice.sched_core.slowdown import Slowdown

from .bids import Bid, Gang, Option

#: How the 1/N share of T_id is taken: as so many devices, or as N times the time on the whole cluster.
Ideal = Literal["share", "times_n"]
#: An app is finished with its first good model, or when all its jobs are.
Goal = Literal["all", "first"]


class Agent:
    """One app: its jobs, its history, its ρ.

    Parameters
    ----------
    app
        Its name.
    start_s
        When its first job arrived.
    goal
        What finishes it.
    slowdown
        S(G) of its jobs' placements.
    crowd_s
        The arbiter's clock of app-seconds at ``start_s``, to find the average contention N later.
    ideal
        How T_id is reckoned.
    """

    def __init__(
        self, app: str, start_s: float, goal: Goal, slowdown: Slowdown, crowd_s: float, ideal: Ideal = "share"
    ) -> None:
        self.app = app
        self.start_s = start_s
        self.jobs: dict[str, Job] = {}
        self._goal: Goal = goal
        self._slowdown = slowdown
        self._crowd_s = crowd_s
        self._ideal = ideal
        #: Of every job the app ever had: (seconds, device-seconds) on dedicated devices.
        self._works: list[tuple[float, float]] = []
        #: The moment, as ``view.now_s`` and ``crowd_s``, and T_id then.
        self._ideal_at = (nan, 0.0, 0.0)

    def add(self, job: Job, view: View) -> None:
        """Take in a new job."""
        self.jobs[job.id] = job
        duration_s = view.remaining_s(job) + job.progress_at(view.now_s)
        self._works.append((duration_s, duration_s * job.demand))
        self._ideal_at = (nan, 0.0, 0.0)

    def ideal_s(self, view: View, crowd_s: float) -> float:
        """T_id: the finish time alone on a 1/N share, N the average number of apps during the app's life."""
        if self._ideal_at[:2] != (view.now_s, crowd_s):
            self._ideal_at = (view.now_s, crowd_s, self._ideal_now_s(view, crowd_s))
        return self._ideal_at[2]

    def _ideal_now_s(self, view: View, crowd_s: float) -> float:
        life_s = view.now_s - self.start_s
        contention = (crowd_s - self._crowd_s) / life_s if life_s > 0 else 1.0
        size = view.cluster.size
        if self._ideal == "times_n":
            return _joint(self._works, size, self._goal) * max(1.0, contention)
        return _joint(self._works, size / max(1.0, contention), self._goal)

    def rho(self, view: View, crowd_s: float) -> float:
        """ρ = T_sh / T_id with what the app holds now; infinite if it holds nothing."""
        held = [self._gang(job, view) for job in self.jobs.values() if job.running]
        # Without any, all terms but the wait are finite.
        return self._rho(view, crowd_s, held, wait_s=inf) if held else inf

    def nothing(self, view: View, crowd_s: float, wait_s: float) -> float:
        """1/ρ if the app gets no more than it holds, and the next offer comes in ``wait_s``."""
        if len(self.jobs) == 1:
            # The same as below without the detours: most apps are one job, and all that wait are asked.
            (job,) = self.jobs.values()
            if not job.running:
                left_s = max(view.remaining_s(job), 0.0)
                alone_s = max(left_s, left_s * job.demand / view.cluster.size)
                shared_s = view.now_s - self.start_s + wait_s + alone_s
                return 1.0 / (max(shared_s, 1e-9) / max(self.ideal_s(view, crowd_s), 1e-9))
        held = [self._gang(job, view) for job in self.jobs.values() if job.running]
        return 1.0 / self._rho(view, crowd_s, held, wait_s=wait_s)

    def bid(
        self, view: View, crowd_s: float, offer: FreeDevices, asking: Sequence[Job], wait_s: float
    ) -> Bid:
        """The answer to ``offer``: for 1, 2, … jobs of ``asking`` placed on it, what that would be worth.

        A single job that fits on one node bids for each such node, tightest fit first. ``wait_s`` is how long
        an app that gets nothing waits for the next offer.
        """
        held = [self._gang(job, view) for job in self.jobs.values() if job.running and job not in asking]
        nothing = self._rho(view, crowd_s, held, wait_s=wait_s)
        #: Which nodes does not matter, only on how many each job lies.
        values: dict[tuple[tuple[str, int, int], ...], float] = {}
        options: list[Option] = []
        for gangs in _ways(asking, offer):
            shape = tuple((job, sum(count for _, count in counts), len(counts)) for job, counts in gangs)
            if shape not in values:
                values[shape] = 1.0 / self._rho(view, crowd_s, held + gangs, wait_s=wait_s)
            options.append(Option(tuple(gangs), values[shape]))
        return Bid(self.app, 1.0 / nothing, tuple(options))

    def _gang(self, job: Job, view: View) -> Gang:
        return job.id, _counted(job.placement, view.cluster)

    def _rho(self, view: View, crowd_s: float, gangs: Iterable[Gang], wait_s: float) -> float:
        """ρ if the app's jobs held ``gangs``; without any, if all were well in ``wait_s``."""
        works: list[tuple[float, float]] = []
        devices = 0
        given = dict(gangs)
        for job in self.jobs.values():
            left_s = max(view.remaining_s(job), 0.0)
            counts = given.get(job.id)
            if counts is not None:
                size = sum(count for _, count in counts)
                left_s *= self._slowdown.of(job.spec, size, len(counts), view.cluster) * job.demand / size
                devices += size
            elif self._goal == "first" and given:
                continue
            works.append((left_s, left_s * job.demand))
        if not given:
            devices, left_s = view.cluster.size, wait_s
        else:
            left_s = 0.0
        shared_s = view.now_s - self.start_s + left_s + _joint(works, devices, self._goal)
        return max(shared_s, 1e-9) / max(self.ideal_s(view, crowd_s), 1e-9)


def _joint(works: Sequence[tuple[float, float]], devices: float, goal: Goal) -> float:
    """Finish time of (seconds, device-seconds) jobs on ``devices`` devices: of all, or of the first."""
    if len(works) == 1:
        seconds, work = works[0]
        return max(seconds, work / devices)
    if goal == "first":
        return min((max(seconds, work / devices) for seconds, work in works), default=0.0)
    longest = max((seconds for seconds, _ in works), default=0.0)
    return max(longest, sum(work for _, work in works) / devices)


def _ways(asking: Sequence[Job], offer: FreeDevices) -> Iterable[list[Gang]]:
    if not asking:
        return
    first = asking[0]
    before: int | None = None
    if len(first.placement) == first.demand and offer.has(first.placement):
        # Ties go to the first option: a job that has run stays where it was.
        counts = _counted(first.placement, offer.cluster)
        before = counts[0][0] if len(counts) == 1 else None
        yield [(first.id, counts)]
    if first.demand < len(offer.nodes_with):
        roomy = [node for nodes in offer.nodes_with[first.demand :] for node in nodes if node != before]
        for node in roomy:
            yield [(first.id, ((node, first.demand),))]
    left = {node: len(free) for node, free in enumerate(offer.on_node) if free}
    gangs: list[Gang] = []
    for job in asking:
        packed = _packed(job.demand, left)
        if packed is None:
            continue
        gangs.append((job.id, packed))
        for node, count in packed:
            left[node] -= count
        if len(gangs) > 1 or len(packed) > 1 or job is not first:
            yield list(gangs)


def _packed(demand: int, left: dict[int, int]) -> tuple[tuple[int, int], ...] | None:
    """The tightest node that takes ``demand`` devices, else the emptiest nodes until it is met."""
    if demand > sum(left.values()):
        return None
    fitting = [(count, node) for node, count in left.items() if count >= demand]
    if fitting:
        return ((min(fitting)[1], demand),)
    counts: list[tuple[int, int]] = []
    for node, count in sorted(left.items(), key=lambda item: (-item[1], item[0])):
        counts.append((node, min(count, demand)))
        demand -= counts[-1][1]
        if not demand:
            break
    return tuple(counts)


def _counted(devices: Sequence[int], cluster: Cluster) -> tuple[tuple[int, int], ...]:
    counts: dict[int, int] = {}
    for device in devices:
        node = cluster.node_of[device]
        counts[node] = counts.get(node, 0) + 1
    return tuple(counts.items())
