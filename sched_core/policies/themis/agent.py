"""The agent of one app: works out its finish-time fairness and answers offers with bids.

Source: Themis (NSDI 2020), sections 3.2 and 4.3. An agent sees only the offer made to it (pessimistic), while
the arbiter may make the same offer to several agents at once (optimistic).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, inf, nan
from typing import Literal

from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.policy import View
from gpuslice.sched_core.slowdown import Slowdown
from gpuslice.sched_core.speedup import SpeedCurve

from .bids import Bid, Gang, Option
from .ways import gang_size, ways, where

#: How the 1/N share of T_id is taken: as so many devices, or as N times the time on the whole cluster.
Ideal = Literal["share", "times_n"]
#: An app is finished with its first good model, or when all its jobs are.
Goal = Literal["all", "first"]


class Agent:
    """An app's agent: its jobs, its history and its ρ.

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
        The arbiter's clock of app-seconds now, to find the average contention N later.
    ideal
        How T_id is reckoned.
    seen_s
        Now, if that is later than ``start_s``: it was held back, or comes from a pool for trials.
    """

    def __init__(
        self,
        app: str,
        start_s: float,
        goal: Goal,
        slowdown: Slowdown,
        crowd_s: float,
        ideal: Ideal = "share",
        seen_s: float | None = None,
    ) -> None:
        self.app = app
        self.start_s = start_s
        self.jobs: dict[str, Job] = {}
        self._goal: Goal = goal
        self._slowdown = slowdown
        self._seen_s = start_s if seen_s is None else seen_s
        self._crowd_s = crowd_s
        self._ideal = ideal
        #: Of every job the app ever had: (seconds, device-seconds) on dedicated devices.
        self._works: dict[str, tuple[float, float]] = {}
        #: Of those of them that are elastic, with their seconds: they take less on more devices.
        self._elastic: dict[str, tuple[Job, float]] = {}
        self._speeds: dict[str, SpeedCurve] = {}
        #: The moment, as ``view.now_s`` and ``crowd_s``, and T_id then.
        self._ideal_at = (nan, 0.0, 0.0)

    def add(self, job: Job, view: View) -> None:
        """Take in a new job."""
        self.jobs[job.id] = job
        self._reckon(job, view)
        if job.least < job.most:
            self._speeds[job.id] = SpeedCurve()
            self.learn_speeds(view)
        self._ideal_at = (nan, 0.0, 0.0)

    def _reckon(self, job: Job, view: View) -> None:
        """Note how long ``job`` runs, as far as is known now."""
        duration_s = _duration_s(job, view)
        if job.least < job.most:
            self._elastic[job.id] = job, duration_s
        self._works[job.id] = duration_s, duration_s * job.demand

    def learn_speeds(self, view: View) -> None:
        """Learn the measured speeds of the app's elastic jobs."""
        for job, _ in self._elastic.values():
            if job.id in self.jobs:
                self._speeds[job.id].learn(view.throughput.speeds(job))

    def gains(self, job: Job, devices: int) -> bool:
        """Return True if ``job`` may have ``devices`` devices and is faster than on one less."""
        return devices <= job.most and self._speeds[job.id].gains(devices, job.demand)

    def _rate(self, job: Job, devices: int) -> float:
        """Return the progress per second of ``job`` on ``devices`` devices of one node."""
        if job.least == job.most:
            return devices / job.demand
        return self._speeds[job.id].rate(devices, job.demand)

    def _best_rate(self, job: Job, devices: float) -> float:
        """Return the best progress per second on up to ``devices`` devices, at least its least number."""
        if job.least == job.most:
            return 1.0
        count = job.least
        while count < floor(devices) and self.gains(job, count + 1):
            count += 1
        return self._rate(job, count)

    def ideal_s(self, view: View, crowd_s: float) -> float:
        """Return T_id: the finish time alone on a 1/N share.

        N is the average number of apps since the app was seen.
        """
        if self._ideal_at[:2] != (view.now_s, crowd_s):
            self._ideal_at = (view.now_s, crowd_s, self._ideal_now_s(view, crowd_s))
        return self._ideal_at[2]

    def _ideal_now_s(self, view: View, crowd_s: float) -> float:
        seen_for_s = view.now_s - self._seen_s
        contention = (crowd_s - self._crowd_s) / seen_for_s if seen_for_s > 0 else 1.0
        whole = self._ideal == "times_n"
        size = view.cluster.size if whole else view.cluster.size / max(1.0, contention)
        for job in self.jobs.values():
            self._reckon(job, view)
        for job, duration_s in self._elastic.values():
            self._works[job.id] = (duration_s / self._best_rate(job, size), duration_s * job.demand)
        ideal_s = _joint(list(self._works.values()), size, self._goal)
        return ideal_s * max(1.0, contention) if whole else ideal_s

    def rho(self, view: View, crowd_s: float) -> float:
        """Return ρ = T_sh / T_id with what the app holds now. Return infinity if it holds nothing."""
        held = [self._gang(job, view) for job in self.jobs.values() if job.running]
        # Without any, all terms but the wait are finite.
        return self._rho(view, crowd_s, held, wait_s=inf) if held else inf

    def nothing(self, view: View, crowd_s: float, wait_s: float) -> float:
        """Return the value 1/ρ of winning nothing in this auction, with the next offer in ``wait_s``."""
        if len(self.jobs) == 1:
            # The same as below without the detours: most apps are one job, and all that wait are asked.
            (job,) = self.jobs.values()
            if not job.running:
                left_s = max(_left_s(job, view), 0.0)
                size = view.cluster.size
                alone_s = max(left_s / self._best_rate(job, size), left_s * job.demand / size)
                shared_s = view.now_s - self.start_s + wait_s + alone_s
                return 1.0 / (max(shared_s, 1e-9) / max(self.ideal_s(view, crowd_s), 1e-9))
        held = [self._gang(job, view) for job in self.jobs.values() if job.running]
        return 1.0 / self._rho(view, crowd_s, held, wait_s=wait_s)

    def bid(
        self,
        view: View,
        crowd_s: float,
        offer: FreeDevices,
        asking: Sequence[Job],
        wait_s: float,
        widest: float = inf,
        *,
        every_node: bool = True,
    ) -> Bid:
        """Return the app's bid: what 1, 2, … jobs of ``asking`` placed on ``offer`` would be worth.

        A single job that fits on one node bids for each such node, tightest fit first. Elastic jobs bid for
        their least numbers of devices so; then for one device after the other more, while that makes them
        faster and the app has at most ``widest`` devices of the offer. ``wait_s`` is how long an app that
        gets nothing waits for the next offer. Without ``every_node`` only the first of equal bids is made.
        """
        held = [self._gang(job, view) for job in self.jobs.values() if job.running and job not in asking]
        nothing = self._rho(view, crowd_s, held, wait_s=wait_s)
        #: Which nodes does not matter, only on how many each job lies.
        values: dict[tuple[tuple[str, int, int], ...], float] = {}
        options: list[Option] = []
        for gangs in ways(asking, offer, self.gains, widest, every_node=every_node):
            shape = tuple((gang[0], gang_size(gang), len(gang[1])) for gang in gangs)
            if shape not in values:
                values[shape] = 1.0 / self._rho(view, crowd_s, held + gangs, wait_s=wait_s)
            options.append(Option(tuple(gangs), values[shape]))
        return Bid(self.app, 1.0 / nothing, tuple(options))

    def _gang(self, job: Job, view: View) -> Gang:
        return job.id, where(job.placement, view.cluster)

    def _rho(self, view: View, crowd_s: float, gangs: Iterable[Gang], wait_s: float) -> float:
        """Return ρ, the app's finish-time fairness, as if its jobs held ``gangs``.

        Without gangs, if all its jobs began in ``wait_s``.
        """
        works: list[tuple[float, float]] = []
        devices = 0
        given = dict(gangs)
        for job in self.jobs.values():
            left_s = max(_left_s(job, view), 0.0)
            counts = given.get(job.id)
            if counts is not None:
                size = gang_size((job.id, counts))
                left_s *= self._slowdown.of(job.spec, size, len(counts), view.cluster) / self._rate(job, size)
                devices += size
                works.append((left_s, left_s * size))
                continue
            if self._goal == "first" and given:
                continue
            works.append((left_s / self._best_rate(job, view.cluster.size), left_s * job.demand))
        if not given:
            devices, left_s = view.cluster.size, wait_s
        else:
            left_s = 0.0
        shared_s = view.now_s - self.start_s + left_s + _joint(works, devices, self._goal)
        return max(shared_s, 1e-9) / max(self.ideal_s(view, crowd_s), 1e-9)


def _duration_s(job: Job, view: View) -> float:
    """Return the job's total work, in seconds of a dedicated run.

    Return twice what was done if it has exceeded what it stated.
    """
    duration_s = view.duration_s(job)
    if duration_s < inf:
        return duration_s
    progress_s = job.progress_at(view.now_s)
    return progress_s + max(progress_s, 1.0)


def _left_s(job: Job, view: View) -> float:
    """Return the job's remaining work, in seconds of a dedicated run."""
    return _duration_s(job, view) - job.progress_at(view.now_s)


def _joint(works: Sequence[tuple[float, float]], devices: float, goal: Goal) -> float:
    """Return when jobs of (seconds, device-seconds) have ended on so many devices: all, or the first."""
    if len(works) == 1:
        seconds, work = works[0]
        return max(seconds, work / devices)
    if goal == "first":
        return min((max(seconds, work / devices) for seconds, work in works), default=0.0)
    longest = max((seconds for seconds, _ in works), default=0.0)
    return max(longest, sum(work for _, work in works) / devices)
