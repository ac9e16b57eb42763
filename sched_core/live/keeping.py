"""``down --keep``: park all jobs, end their processes and move their snapshots to a disk, or let all go on.

Nothing is given up before it is known that all can be kept. So jobs are parked first. If one of them cannot
be kept, or the disk has no room, all go on in the processes that they have. After that the processes end. If
the snapshots cannot be moved all the same, the jobs are started again from the snapshots that they left.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Protocol

from gpuslice.errors import GpusliceError, UnforeseenError, UsageError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.core.kept_jobs import describe
from gpuslice.sched_core.jobs import places
from gpuslice.sched_core.jobs.facts import Keep
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.kept import KeptJobs
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Kept

from .scheduler import Scheduler

_log = logging.getLogger(__name__)
#: A job that has refused to be suspended so often is not expected to do it soon.
_REFUSALS = 2
_MOST_NAMES = 10
#: How often a job may train on to park at another boundary, and how long that may take each time.
_TRIES = 6
_TRAINS_ON_AT_MOST_S = 60.0
_REMEDY = "cancel them, or let them finish (`gpuslice down --drain`); all jobs go on"

_CALLED_OFF = UsageError("`gpuslice down --keep` was called off", "all jobs go on")


class Shelf(Protocol):
    """Where snapshots are kept."""

    def check(self) -> None:
        """Raise a ``GpusliceError`` if there is no room for the snapshots of the parked jobs."""
        ...

    def store(self, kept: dict[str, int]) -> None:
        """Move the snapshots there, of so many ranks of each job, and verify them; raise likewise."""
        ...

    def note(self, jobs: KeptJobs) -> None:
        """Write down all that a later scheduler must know of ``jobs``; raise likewise."""
        ...

    def begin(self) -> None:
        """Forget what was written down: jobs are about to be started."""
        ...


class _Phase(Enum):
    OFF = "off"
    PARKING = "parking"
    ENDING = "ending"
    STORING = "storing"
    DONE = "done"


@dataclass(slots=True)
class _Later:
    """How often a job has parked where only itself can go on, and how far it is to train before it parks."""

    tries: int = 0
    boundary: int = 0
    until_s: float = inf

    def begin(self, boundary: int, now: float) -> None:
        """Have the job, which is parked at ``boundary``, train 1, 2, 4, ... boundaries more."""
        self.boundary, self.until_s = boundary + 2**self.tries, now + _TRAINS_ON_AT_MOST_S
        self.tries += 1

    def is_over(self, boundary: int, now: float) -> bool:
        """Return True if the job, which is at ``boundary``, is to park again."""
        return boundary >= self.boundary or now >= self.until_s


class Keeping:
    """The course of ``down --keep`` within the loop of ``scheduler``.

    Parameters
    ----------
    scheduler
        Its jobs are kept.
    shelf
        Where their snapshots go.
    """

    def __init__(self, scheduler: Scheduler, shelf: Shelf) -> None:
        self._scheduler, self._shelf = scheduler, shelf
        self._phase = _Phase.OFF
        #: The jobs that train on to a boundary from whose snapshot another process can go on.
        self._later: dict[str, _Later] = {}
        self._refused: Callable[[GpusliceError], object] = lambda error: None
        #: Set once the snapshots have been moved, or that has failed.
        self._stored = threading.Event()
        self._failure: GpusliceError | None = None
        self._called_off = False
        #: What was written down, and when.
        self._noted: KeptJobs | None = None
        self._noted_s = 0.0
        self._storing: threading.Thread | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        scheduler.register(self._wake, lambda: os.eventfd_read(self._wake))

    @property
    def done(self) -> bool:
        """True if all jobs are kept: the scheduler may leave."""
        return self._phase is _Phase.DONE

    def begin(self, refused: Callable[[GpusliceError], object]) -> None:
        """Begin to keep all jobs. ``refused`` is called if that turns out to be impossible."""
        self._refused = refused
        if self._phase is _Phase.OFF:
            self._scheduler.apply_request(Kept(Keep.PARK))
            self._phase = _Phase.PARKING

    def call_off(self) -> bool:
        """Let all jobs go on, in new processes if theirs have ended. Return False if none is being kept."""
        if self._phase in (_Phase.PARKING, _Phase.ENDING):
            self._give_up(_CALLED_OFF)
        elif self._phase is _Phase.STORING:
            self._called_off = True  # once the snapshots are where they go
        else:
            return False
        return True

    def advance(self) -> bool:
        """Go on as far as is possible now. Return True once all jobs are kept."""
        core, now = self._scheduler.core, self._scheduler.now()
        if self._phase is _Phase.PARKING:
            self._train_on(core, now)
        if self._phase is _Phase.PARKING and all(_has_come_to_rest(job) for job in core.jobs.values()):
            self._end_processes(core, now)
        elif self._phase is _Phase.PARKING and (found := self._obstacles(core, now)):
            self._give_up(_cannot_be_kept(found))
        if self._phase is _Phase.ENDING and all(job.processes_gone for job in core.jobs.values()):
            self._store(core)
        if self._phase is _Phase.STORING and self._stored.is_set():
            self._conclude(core, now)
        elif self._phase is _Phase.DONE:
            self._note_changes(core)
        return self.done

    def close(self) -> None:
        """Give the descriptor back, once nothing is being moved."""
        if self._storing is not None:
            self._storing.join()
        os.close(self._wake)

    def _end_processes(self, core: Core, now: float) -> None:
        if found := self._obstacles(core, now):
            self._give_up(_cannot_be_kept(found))
            return
        try:
            self._shelf.check()
        except GpusliceError as error:
            self._give_up(error)
            return
        self._scheduler.apply_request(Kept(Keep.END))
        self._phase = _Phase.ENDING

    def _train_on(self, core: Core, now: float) -> None:
        """Let each job that parked at a boundary from which only itself can go on train on to a later one."""
        for job in core.jobs.values():
            later = None if job.state.ended else self._later.get(job.id)
            if job.keep and _goes_on_later(job):
                later = self._later.setdefault(job.id, _Later())
                if later.tries < _TRIES:
                    later.begin(_boundary(job), now)
                    self._scheduler.apply_request(Kept(None, job.id))
            elif later is not None and not job.keep and later.is_over(_boundary(job), now):
                self._scheduler.apply_request(Kept(Keep.PARK, job.id))

    def _obstacles(self, core: Core, now: float) -> list[tuple[str, str]]:
        """Return the jobs that cannot be kept, as far as is known by now, and why each cannot."""
        jobs = [job for job in core.jobs.values() if job.keep and not job.state.ended]
        found = [(job.id, _obstacle(core, job, now)) for job in jobs]
        return [(job, reason) for job, reason in found if reason]

    def _store(self, core: Core) -> None:
        kept = {
            job.id: job.keepers
            for job in core.jobs.values()
            if job.keep and not job.state.ended and job.state_nodes and not job.spec.relaunch
        }

        def move() -> None:
            try:
                self._shelf.store(kept)
            except GpusliceError as error:
                self._failure = error
            except Exception as error:  # noqa: BLE001 - told to whoever asked; all jobs go on
                told = f"{type(error).__name__}: {error}"
                self._failure = UnforeseenError(f"nothing is kept: {told}", "this is a bug; all jobs go on")
            finally:
                self._stored.set()
                os.eventfd_write(self._wake, 1)

        self._phase, self._failure = _Phase.STORING, None
        self._stored.clear()
        self._storing = threading.Thread(target=move, name="gpuslice-keep")
        self._storing.start()

    def _conclude(self, core: Core, now: float) -> None:
        """Have all that is known of the jobs written down, unless their snapshots could not be moved."""
        try:
            if self._called_off:
                self._failure = self._failure or _CALLED_OFF
            if self._failure is None:
                self._noted, self._noted_s = describe(core.state, now), now
                self._shelf.note(self._noted)
        except GpusliceError as error:
            self._failure = error
        if self._failure is None:
            self._phase = _Phase.DONE
        else:
            self._give_up(self._failure)

    def _note_changes(self, core: Core) -> None:
        """Write down again what is kept, if that has changed while the scheduler had yet to leave."""
        jobs = describe(core.state, self._noted_s)
        if jobs == self._noted:
            return
        self._noted = jobs
        try:
            self._shelf.note(jobs)
        except GpusliceError as error:
            _log.warning("what is kept could not be written down again: %s", error)
            self._shelf.begin()  # then the journal alone tells

    def _give_up(self, error: GpusliceError) -> None:
        """Let all jobs go on, and say why."""
        self._phase, self._called_off = _Phase.OFF, False
        self._later.clear()
        self._scheduler.apply_request(Kept(None))
        self._refused(error)


def release(scheduler: Scheduler, shelf: Shelf) -> None:
    """Schedule the jobs again that the last scheduler has kept, or had begun to keep."""
    shelf.begin()
    if any(job.keep for job in scheduler.core.jobs.values()):
        scheduler.apply_request(Kept(None))


def _has_come_to_rest(job: Gang) -> bool:
    """Return True if ``job`` has ended, or has no devices and is not on its way anywhere."""
    if job.state.ended:
        return job.processes_gone
    if job.keep is None:
        return False
    return job.state in (JobState.QUEUED, JobState.SUSPENDED) and not job.lease and not job.relocating


def _obstacle(core: Core, job: Gang, now: float) -> str:
    """Return why ``job`` cannot be kept; empty if nothing is known to be in the way."""
    nodes = core.state.nodes
    away = [name for name in nodes.named(job.nodes + job.state_nodes) if name]
    if away and (job.command.launched or job.state_nodes):
        return f"it is on node {away[0]}, and what is kept is here: `gpuslice migrate` brings it"
    if job.lease:
        return _stays(job)
    if not job.command.runs or job.relocating or not _has_come_to_rest(job):
        return ""
    if job.processes.idle_since_s is not None:
        return "its command goes on without a training"
    if job.may_be_no_training(now):
        return f"its command has run for {now - job.command.launched_s:.0f} s without a training"
    if not _needs_snapshot(job) or job.portable:
        return ""
    if job.portable_later:
        return f"at none of {_TRIES} boundaries another process could go on from its snapshot"
    return (
        "no other process can go on from its snapshot: its script has neither `gpuslice.attach` nor a "
        f"trainer that restarts, or stderr says what forbids it (`gpuslice logs --err {job.id}`)"
    )


def _needs_snapshot(job: Gang) -> bool:
    """Return True if the parked ``job`` can be continued in another process only from a snapshot."""
    return job.processes.trains and not job.spec.relaunch


def _goes_on_later(job: Gang) -> bool:
    """Return True if ``job`` is parked, and another process can go on from a later boundary only."""
    rests = _has_come_to_rest(job) and not job.state.ended and job.command.runs
    return rests and _needs_snapshot(job) and not job.portable and job.portable_later


def _boundary(job: Gang) -> int:
    return max(rank.boundary for rank in job.ranks)


def _stays(job: Gang) -> str:
    """Return why ``job`` is not expected to leave its devices soon; empty if it is."""
    if job.processes.beside:
        return places.obstacle(job) or "a child of it trains beside it"
    if job.refusals.suspend.failures >= _REFUSALS:
        return f"it cannot be suspended: {job.refusals.suspend_error}"
    return "it has reached no boundary in time" if job.lateness.late else ""


def _cannot_be_kept(found: list[tuple[str, str]]) -> UsageError:
    named = [f"{job} ({reason})" for job, reason in found[:_MOST_NAMES]]
    if len(found) > _MOST_NAMES:
        named.append(f"{len(found) - _MOST_NAMES} more")
    jobs = "1 job" if len(found) == 1 else f"{len(found)} jobs"
    return UsageError(f"{jobs} cannot be kept: {'; '.join(named)}", _REMEDY)
