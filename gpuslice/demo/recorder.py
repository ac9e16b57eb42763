"""A record of the shared run, made from the scheduler's events: slices, switches and the timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpuslice.profiler.timeline import Holding, Span, Timeline
from gpuslice.sched_core.lifecycle.events import Command, Event, Exited, Reported, Submitted, Tell
from gpuslice.sched_core.switch_cost_model import costs_s
from gpuslice.verbs import JobInfo
from gpuslice.wire import Bye, Progress, Resume, Resumed, Suspend, Suspended

#: Called with an event, the time when it happened, and the commands that followed from it.
Observer = Callable[[Event, float, Sequence[Command]], None]


@dataclass(slots=True)
class Slice:
    """One lease of one job. Times are in seconds since the recorder's start; ``None``: not yet.

    Attributes
    ----------
    granted_s, resumed_s
        When the job was told to resume, and when it had resumed.
    revoked_s, parked_s
        When the job was told to suspend, and when it was suspended. ``parked_s`` is when the process ended,
        if the job ended.
    suspend_s, resume_s
        Durations of the suspend and the resume.
    ended
        True if the job ended in this slice.
    """

    job: str
    device: str
    number: int
    granted_s: float
    resumed_s: float | None = None
    revoked_s: float | None = None
    parked_s: float | None = None
    suspend_s: float = 0.0
    resume_s: float = 0.0
    nbytes: int = 0
    first_step: int = 0
    last_step: int = 0
    ended: bool = False
    stages_s: dict[str, float] = field(default_factory=dict)

    @property
    def trained_until_s(self) -> float | None:
        """When the job made its last progress in this slice; None if the slice is not over."""
        return None if self.parked_s is None else self.parked_s - self.suspend_s


@dataclass(frozen=True, slots=True)
class Switch:
    """A change of a device from one job to another. Nobody made progress on it for ``blackout_s``."""

    at_s: float
    leaving: str
    coming: str
    suspend_s: float
    handoff_s: float
    resume_s: float
    nbytes: int

    @property
    def blackout_s(self) -> float:
        return self.suspend_s + self.handoff_s + self.resume_s


@dataclass(slots=True)
class JobRecord:
    """The steps, slices and exit code of one job."""

    name: str
    submitted_s: float
    step: int = 0
    slices: list[Slice] = field(default_factory=list)
    leases: dict[int, Slice] = field(default_factory=dict)
    exit_code: int | None = None

    def slice_of(self, epoch: int) -> Slice:
        """Return the slice of the lease with this epoch."""
        return self.leases[epoch]

    @property
    def suspends(self) -> list[Slice]:
        """The slices that ended in a suspend."""
        return [one for one in self.slices if one.parked_s is not None and not one.ended]


class Recorder:
    """A recorder that turns a scheduler's events into slices and switches, for jobs of one rank."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self.jobs: dict[str, JobRecord] = {}
        #: All slices, in the order of their leases.
        self.slices: list[Slice] = []
        self.switches: list[Switch] = []
        #: The job on each device, by the device's name.
        self.holders: dict[str, str] = {}
        #: The steps of each job by the latest status, which may be newer than the job's last event.
        self.heard: dict[str, int] = {}

    def since_start_s(self, now: float) -> float:
        """Return ``now`` in seconds since the recorder's start."""
        return now - self._start_s

    def look(self, jobs: Sequence[JobInfo]) -> None:
        """Record how many steps each job has made."""
        self.heard = {job.id: job.steps for job in jobs}

    def observe(self, event: Event, now: float, commands: Sequence[Command]) -> None:
        """Record an event and the commands that followed from it."""
        now_s = self.since_start_s(now)
        match event:
            case Submitted():
                self.jobs[event.spec.id] = JobRecord(event.spec.id, now_s)
            case Reported():
                self._report(self.jobs[event.job], event, now_s)
            case Exited():
                self._exited(self.jobs[event.job], event, now_s)
        for command in commands:
            if isinstance(command, Tell):
                self._told(self.jobs[command.job], command, now_s)

    def _report(self, job: JobRecord, event: Reported, now_s: float) -> None:
        message = event.message
        if isinstance(message, Progress | Suspended | Bye):
            job.step = max(job.step, message.step)
        if isinstance(message, Resumed):
            self._resumed(job.slice_of(message.epoch), message, now_s)
        elif isinstance(message, Suspended):
            present = job.slice_of(message.epoch)
            present.parked_s = now_s
            present.suspend_s = sum(message.stages_s.values())
            present.stages_s |= message.stages_s
            present.nbytes, present.last_step = message.nbytes, message.step
            self.holders.pop(present.device, None)

    def _resumed(self, present: Slice, message: Resumed, now_s: float) -> None:
        present.resumed_s = now_s
        present.resume_s = now_s - present.granted_s
        present.stages_s |= costs_s(message.stages_s)
        before = next(
            (one for one in reversed(self.slices) if one is not present and one.device == present.device),
            None,
        )
        if before is not None and before.parked_s is not None:
            self.switches.append(
                Switch(
                    at_s=before.parked_s - before.suspend_s,
                    leaving=before.job,
                    coming=present.job,
                    suspend_s=before.suspend_s,
                    handoff_s=present.granted_s - before.parked_s,
                    resume_s=present.resume_s,
                    nbytes=before.nbytes,
                )
            )

    def _exited(self, job: JobRecord, event: Exited, now_s: float) -> None:
        job.exit_code = event.code
        if job.slices and job.slices[-1].parked_s is None:
            last = job.slices[-1]
            last.parked_s, last.last_step, last.ended = now_s, job.step, True
            self.holders.pop(last.device, None)

    def _told(self, job: JobRecord, command: Tell, now_s: float) -> None:
        message = command.message
        if isinstance(message, Resume):
            device = message.device
            self.slices.append(Slice(job.name, device, len(job.slices) + 1, now_s, first_step=job.step))
            job.slices.append(self.slices[-1])
            self.holders[device] = job.name
            job.leases[message.epoch] = job.slices[-1]
        elif isinstance(message, Suspend) and job.slices[-1].revoked_s is None:
            job.slices[-1].revoked_s = now_s

    @property
    def busy_s(self) -> float:
        """Seconds from the first progress on a device to the last."""
        begins = [one.resumed_s for one in self.slices if one.resumed_s is not None]
        ends = [one.parked_s for one in self.slices if one.parked_s is not None]
        return max(ends) - min(begins) if begins and ends else 0.0

    @property
    def share_lost(self) -> float:
        """The share of ``busy_s``, 0 to 1, in which switches kept the device from making progress."""
        return sum(switch.blackout_s for switch in self.switches) / self.busy_s if self.busy_s else 0.0

    def timeline(self) -> Timeline:
        """Return a timeline with a track of slices and memory per device, and a track of phases per job."""
        timeline = Timeline()
        for one in self.slices:
            timeline.track("devices", one.device).spans.extend(_spans(one))
            timeline.track("devices", one.device).holdings.extend(self._holdings(one))
        for job in self.jobs.values():
            track = timeline.track("jobs", job.name)
            waiting_since_s = job.submitted_s
            for one in job.slices:
                name = "parked" if one.number > 1 else "waiting"
                track.spans.append(Span(f"{job.name} {name}", name, waiting_since_s, one.granted_s, job.name))
                track.spans.extend(_spans(one))
                waiting_since_s = one.parked_s if one.parked_s is not None else one.granted_s
        return timeline

    def _holdings(self, one: Slice) -> list[Holding]:
        """Return the device memory of the job's state in slice ``one``, from its resume to its suspend's end.

        A suspend reports the size. A job that ends reports none, so the size of its last suspend counts.
        """
        if one.resumed_s is None or one.parked_s is None:
            return []
        before = [past.nbytes for past in self.jobs[one.job].slices if past.number < one.number]
        nbytes = before[-1] if one.ended and before else one.nbytes
        begin_s = one.granted_s if before else one.resumed_s
        return [Holding(one.job, begin_s, one.parked_s, nbytes)] if nbytes else []


def _spans(one: Slice) -> list[Span]:
    """Return the spans of the resume, the training and the suspend of slice ``one``; none before its end."""
    if one.resumed_s is None or one.parked_s is None or one.trained_until_s is None:
        return []
    name = f"{one.job} #{one.number}"
    details = {"steps": one.last_step - one.first_step, "last step": one.last_step, "MB": one.nbytes / 1e6}
    stages_ms = {f"{stage.removesuffix('_s')} ms": spent * 1e3 for stage, spent in one.stages_s.items()}
    spans = [Span(name, "slice", one.resumed_s, one.trained_until_s, one.job, details)]
    if one.number > 1:
        spans.insert(0, Span(f"{name} resume", "resume", one.granted_s, one.resumed_s, one.job, stages_ms))
    if not one.ended:
        spans.append(
            Span(f"{name} suspend", "suspend", one.trained_until_s, one.parked_s, one.job, stages_ms)
        )
    return spans
