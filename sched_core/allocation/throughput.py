"""How fast live jobs trained, alone, beside others and on how many devices, from ``Measured`` events.

The measurements are kept for the policy by kind of job. A kind outlives its jobs, so the measurements of
earlier jobs tell about the next job of the kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from gpuslice.sched_core.interference import Interval, Sample
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.lifecycle.events import Command, Measured, Notice, Plain
from gpuslice.sched_core.policy import Packs, PackVerdict, Policy
from gpuslice.sched_core.speedup import SpeedCurve

#: The most samples kept of one pair of kinds: steps get slower or faster as a training goes on.
_NEWEST = 16


class MeasuredThroughput:
    """The measured throughput of live jobs; implements ``knowledge.Throughput``.

    Parameters
    ----------
    policy
        The policy. Only one that packs jobs uses measurements beside others.
    order
        The function that sends the notices of the policy's packing verdicts.
    """

    def __init__(self, policy: Policy, order: Callable[[Command], None]) -> None:
        self.use_policy(policy)
        self._order = order
        #: Samples by the kind of the job and the kind of the job beside it (empty: none).
        self._samples: dict[tuple[str, str], deque[Sample]] = {}
        self._busy: dict[str, float] = {}
        #: By kind of elastic job: work and seconds by number of devices, and the speed curve through them.
        self._work: dict[str, dict[int, deque[tuple[int, float]]]] = {}
        self._curves: dict[str, SpeedCurve] = {}

    def use_policy(self, policy: Policy) -> None:
        """Measure for ``policy`` from now on. What was measured is kept."""
        self._policy = policy if isinstance(policy, Packs) else None
        #: How many of its verdicts were told.
        self._told = 0

    @property
    def packs(self) -> bool:
        """True if the policy packs jobs, and so wants to know how they slow each other down."""
        return self._policy is not None

    def wanted(self, job: Gang) -> bool:
        """Return True if the speed of ``job`` is of use: the policy packs jobs, or ``job`` is elastic."""
        return self.packs or job.spec.elastic

    def take(self, event: Measured, jobs: Mapping[str, Gang], now: float) -> None:
        """Keep the measurement of ``event``. Samples beside more than one other job are dropped."""
        self._take_speed(event, jobs[event.job], now)
        beside = jobs.get(event.beside)
        if not event.steps or not event.seconds or (event.beside and beside is None):
            return
        own, other = jobs[event.job].kind, "" if beside is None else beside.kind
        kept = self._samples.setdefault((own, other), deque(maxlen=_NEWEST))
        kept.append(Sample(event.steps, event.seconds))
        if event.busy is not None and not event.beside:
            self._busy[own] = event.busy

    def _take_speed(self, event: Measured, job: Gang, now: float) -> None:
        """Learn from ``event`` how fast the kind of ``job``, if elastic, is on its number of devices."""
        # The ranks of a command that is started anew have each their own batch, of the same size.
        work = event.samples or event.steps * (event.devices if job.spec.relaunch else 1)
        if not job.spec.elastic or event.beside or not (event.devices and work and event.seconds):
            return
        by_devices = self._work.setdefault(job.kind, {})
        by_devices.setdefault(event.devices, deque(maxlen=_NEWEST)).append((work, event.seconds))
        rates = {
            devices: sum(done for done, _ in some) / sum(seconds for _, seconds in some)
            for devices, some in by_devices.items()
        }
        curve = self._curves[job.kind] = SpeedCurve()
        curve.learn({devices: rate / rates[min(rates)] for devices, rate in rates.items()})
        if job.lease:
            job.change_rate(self.rate(job, len(job.lease)), now)
            if job.running and job.since_s < now:
                job.progress_from(now)  # nothing of what it has had is to be reckoned at the new rate

    def rate(self, job: Job, devices: int) -> float:
        """Return the progress per second of ``job`` on ``devices`` devices: 1 on the fewest it may have."""
        if not job.spec.elastic:
            return 1.0
        curve = self._curves.get(job.kind)
        if curve is None:
            return devices / job.demand
        return curve.rate(devices, job.demand) / curve.rate(job.demand, job.demand)

    def speeds(self, job: Job) -> Mapping[int, float]:
        """Return the progress per second of ``job`` for each number of devices measured for its kind."""
        curve = self._curves.get(job.kind)
        if curve is None or not job.spec.elastic:
            return {}
        unit = curve.rate(job.demand, job.demand)
        return {devices: rate / unit for devices, rate in curve.seen.items()}

    def samples(self, job: Job, beside: Job | None) -> Sequence[Sample]:
        """Return the newest samples of ``job`` beside that one job, or alone if ``beside`` is None."""
        return tuple(self._samples.get((job.kind, "" if beside is None else beside.kind), ()))

    def busy(self, job: Job) -> float | None:
        """Return the share of its device that ``job`` used when it was alone. None if not known."""
        return self._busy.get(job.kind)

    def slowdown(self, job: Job) -> Interval | None:
        """Return how much slower ``job`` is beside the job that shares its device. None if not known."""
        return None if self._policy is None else self._policy.slowdown(job.id)

    def tell(self) -> None:
        """Send a notice to each job of every packing verdict that is new since the last call."""
        verdicts = () if self._policy is None else self._policy.verdicts
        for verdict in verdicts[self._told :]:
            for position, name in enumerate(verdict.jobs):
                self._order(_notice(verdict, position, name))
        self._told = len(verdicts)


def _notice(verdict: PackVerdict, position: int, name: str) -> Notice:
    slower, total = verdict.slowdowns[position], verdict.total
    details: dict[str, Plain] = {
        "beside": verdict.jobs[1 - position],
        "slowdown": slower.mean,
        "slowdown_low": slower.low,
        "slowdown_high": slower.high,
        "total": total.mean,
        "total_low": total.low,
        "total_high": total.high,
    }
    return Notice("packed" if verdict.together else "unpacked", name, details)
