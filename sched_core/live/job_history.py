"""The history of each job, told from outside the core: phases, slices, and what switches cost.

The job history is shown every event after the core has taken it, those of the journal as well as new ones. It
decides nothing and the core does not know of it; what it keeps for each job is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.ends.record import EndRecord
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Command,
    Event,
    Exited,
    Kill,
    Launch,
    Notice,
    Reported,
    Tell,
    submitted,
)
from gpuslice.sched_core.switch_cost_model import costs_s
from gpuslice.wire import Resumed, Suspended

from .copies import Copies

#: Slices kept for each job.
RECENT = 8
#: The most details that are kept of a phase; more than any rank of ours reports.
_DETAILS = 64


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a job's life in one state on the same devices.

    Attributes
    ----------
    devices
        The numbers of the devices that its processes could use, in rank order.
    until_s
        When it ended. None while it lasts.
    details
        What its ranks reported meanwhile: bytes, seconds by stage.
    """

    job: str
    state: JobState
    devices: tuple[int, ...]
    epoch: int
    since_s: float
    until_s: float | None = None
    details: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Slice:
    """The devices that a job was given from one moment to another (``None``: it still has them)."""

    devices: tuple[int, ...]
    since_s: float
    until_s: float | None = None


@dataclass(slots=True)
class Attempt:
    """An attempt of a job: when its command was started and ended, and how; ``None``: it has not ended.

    ``number`` counts from 1. ``failure`` is the class and the reason of its failure, if it failed.
    """

    number: int
    since_s: float
    until_s: float | None = None
    exit_code: int | None = None
    failure: str = ""

    def end(self, code: int, now: float) -> None:
        """Note that its command has ended with exit code ``code``."""
        self.until_s, self.exit_code = now, code

    def fail(self, failure: str) -> None:
        """Note the class and the reason of its failure."""
        self.failure = failure


class Account:
    """The history that is kept of one job.

    Attributes
    ----------
    phase
        The present phase.
    slices
        The last ``RECENT`` slices, the oldest first.
    given
        How many slices there were.
    attempts
        The last ``RECENT`` attempts, the oldest first.
    switches
        How often it was suspended and brought back.
    blackout_s
        The total cost of its switches. Time spent parked does not count. For a gang, the slowest rank counts.
        When other processes were started for other devices, the time until it trained again counts, too.
    """

    __slots__ = ("_cost_s", "_parks", "attempts", "blackout_s", "given", "phase", "slices", "switches")

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.slices: deque[Slice] = deque(maxlen=RECENT)
        self.attempts: deque[Attempt] = deque(maxlen=RECENT)
        self.given = 0
        self.switches = 0
        self.blackout_s = 0.0
        #: Seconds of the present switch, and the boundary of the last park, by rank.
        self._cost_s: dict[int, float] = {}
        self._parks: dict[int, tuple[int, int]] = {}

    def reported(self, rank: int, message: Suspended | Resumed) -> bool:
        """Note one rank's half of a switch. Return True if it counts."""
        if message.epoch != self.phase.epoch:
            return False  # too late; the core has dropped it
        if isinstance(message, Suspended):
            park = (message.epoch, message.boundary)
            if self._parks.get(rank) == park:
                return False  # said again after a Hello
            self._parks[rank] = park
            self._remember("bytes", message.nbytes)
        seconds = costs_s(message.stages_s)
        for name, value in seconds.items():
            self._remember(name, value)
        self._cost_s[rank] = self._cost_s.get(rank, 0.0) + sum(seconds.values())
        return True

    def moved(self, job: Gang, now: float) -> Phase:
        """Begin the next phase. Return the phase that has ended."""
        ended, former = _ended(self.phase, now), self.phase
        self.phase = Phase(job.id, job.state, job.lease, job.epoch, now)
        # Processes that follow others on the job's devices have an epoch of their own, and no new slice.
        follows = job.state is JobState.STARTING and bool(former.devices)
        if former.devices and not follows and (former.epoch != job.epoch or not job.lease):
            self.slices[-1].until_s = now
        if job.lease and not follows and (former.epoch != job.epoch or not former.devices):
            self.slices.append(Slice(job.lease, now))
            self.given += 1
        if job.state is JobState.RUNNING and former.state is JobState.RESUMING:
            self.switches += 1
            self.blackout_s += max(self._cost_s.values(), default=0.0)
            self._cost_s.clear()
        elif job.state is JobState.RUNNING:
            self._cost_s.clear()
        return ended

    def exited(self, code: int, now: float) -> None:
        """Note that the command of the present attempt has ended with exit code ``code``."""
        if self.attempts and self.attempts[-1].until_s is None:
            self.attempts[-1].end(code, now)

    def failed(self, notice: Notice) -> None:
        """Note why the last attempt failed."""
        if self.attempts:
            self.attempts[-1].fail(f"{notice.details['class']}: {notice.details['reason']}")

    def arrived(self, notice: Notice) -> None:
        """Add to ``blackout_s`` the time until the job trained again in processes for other devices."""
        blackout_s = notice.details["blackout_s"]
        assert isinstance(blackout_s, float)
        self.blackout_s += blackout_s

    def _remember(self, name: str, value: float) -> None:
        if len(self.phase.details) >= _DETAILS and name not in self.phase.details:
            return  # a rank that makes up names
        self.phase.details[name] = max(value, self.phase.details.get(name, 0.0))


class JobHistory:
    """The histories of all jobs of ``core``.

    Attributes
    ----------
    accounts
        The history of each job, by its id.
    copies
        The newest copy of each job's state on another node.
    ends
        What is to be done about the ends of jobs.
    counted
        The half of a switch that was reported with the last event, if it counts.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.accounts: dict[str, Account] = {}
        self.copies = Copies(core)
        self.ends = EndRecord()
        self.counted: Suspended | Resumed | None = None

    def note(self, event: Event, now: float, commands: Sequence[Command]) -> list[Phase]:
        """Note an event and the commands that followed from it. Return the phases that have ended with it."""
        self.counted = None
        self.copies.note(event, now)
        self.ends.note(event, now)
        if isinstance(event, Reported) and isinstance(event.message, Suspended | Resumed):
            job = self._core.jobs[event.job]
            counts = self.accounts[event.job].reported(event.rank, event.message)
            self.counted = event.message if counts else None
        ended: list[Phase] = []
        # A job that is told to stop when its last rank has just left gets no order.
        touched = _touched(event, commands) | dict.fromkeys(self._core.unreconciled)
        for name in list(touched):  # a device may have passed on without an order
            if (account := self.accounts.get(name)) is not None:
                devices = account.phase.devices
                touched |= {other: None for device in devices for other in self._core.state.occupants[device]}
        for name in touched:
            job, account = self._core.jobs[name], self.accounts.get(name)
            if account is None:
                account = Account(Phase(name, JobState.QUEUED, (), 0, now))
                self.accounts[name] = account
            present = account.phase
            if (job.state, job.lease, job.epoch) != (present.state, present.devices, present.epoch):
                ended.append(account.moved(job, now))
            self.ends.look_at(job)
        if isinstance(event, Exited) and (code := self._core.jobs[event.job].command.exit_code) is not None:
            self.accounts[event.job].exited(code, now)
        for command in commands:
            self._note_command(command, now)
        return ended

    def _note_command(self, command: Command, now: float) -> None:
        if isinstance(command, Launch):
            self.accounts[command.job].attempts.append(Attempt(command.attempt + 1, now))
        elif isinstance(command, Notice) and command.what == "arrived":
            self.accounts[command.job].arrived(command)
        elif isinstance(command, Notice) and command.what in ("failed", "trial_failed"):
            self.accounts[command.job].failed(command)

    def open_phases(self, now: float) -> list[Phase]:
        """Return the phases that have not ended, as if they ended ``now``."""
        return [_ended(account.phase, now) for account in self.accounts.values()]


def _touched(event: Event, commands: Sequence[Command]) -> dict[str, None]:
    """Return the jobs that may be in another state now: a change is reported, or followed by an order."""
    names = [spec.id for spec, _ in submitted(event)] or [getattr(event, "job", "")]
    names += [command.job for command in commands if isinstance(command, Tell | Launch | Kill | Notice)]
    return dict.fromkeys(name for name in names if name)  # a policy's Noted names no job


def _ended(phase: Phase, now: float) -> Phase:
    return Phase(phase.job, phase.state, phase.devices, phase.epoch, phase.since_s, now, phase.details)
