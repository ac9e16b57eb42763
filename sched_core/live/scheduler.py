"""The live shell: the ranks' socket, a timer and processes around the core, in one thread.

Everything the core decides is carried out here, and everything that happens becomes one of its events. No
event ends the scheduler: values are checked before the core sees them, and if the core fails nevertheless,
what it had begun is undone (``restore_core``). Only a journal that cannot be written is the end.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import zmq

from gpuslice.clock import Clock, MonotonicClock
from gpuslice.errors import GpusliceError, UnforeseenError
from gpuslice.files import private_directory
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.places import processes_of
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.journal.journal import JournalError
from gpuslice.sched_core.lifecycle.events import (
    ArraySubmitted,
    Bring,
    Command,
    Compute,
    Computed,
    DeviceRequest,
    DevicesUsed,
    Event,
    FindPort,
    GiveUpAhead,
    Kept,
    Kill,
    Launch,
    Limited,
    NoRoom,
    Noted,
    Notice,
    OwnerRequest,
    SettingsChanged,
    StartAhead,
    Submitted,
    Tell,
    WakeAt,
    Woken,
    encode,
    job_of,
    named,
)
from gpuslice.sched_core.nodes.endpoint import LOCK, lock
from gpuslice.sched_core.nodes.local_node import LocalNode
from gpuslice.sched_core.nodes.node import Reports
from gpuslice.sched_core.nodes.remote_nodes import RemoteNodes
from gpuslice.types import shortened

from .compute_process import Computing
from .housekeeping import Housekeeping
from .job_environment import job_environ
from .job_processes import JobProcesses
from .mishaps import Rejections, SlowDecisions
from .rank_sessions import RankSessions
from .throughput_meter import ThroughputMeter
from .time_of_day import TimeOfDay

#: The longest pause. poll() takes less than 2**31 milliseconds, which are 25 days.
_PAUSE_AT_MOST_MS = 3_600_000
#: The least pause before the core is woken again after it failed.
_AGAIN_S = 1.0
_REASON_CHARACTERS = 1000
#: Notices of what is expected; the log warns of all others.
_EXPECTED = frozenset(
    (
        *("array_starts", "arrived", "began", "first_step", "guaranteed", "idle", "packed", "planned"),
        *("relaunched", "relocated", "resized", "switched", "timed", "trial_passed", "went_on"),
    )
)

Observer = Callable[[Event, float, Sequence[Command]], object]
#: An event that the core has taken, when it happened, and the commands that followed from it.
PastEvent = tuple[Event, float, Sequence[Command]]
_log = logging.getLogger(__name__)


def _ignore(event: Event, now: float, commands: Sequence[Command]) -> None:
    """Do nothing: the observer by default."""


class Scheduler:
    """A running scheduler, as a context manager that ends all processes of jobs, unless they are kept.

    Parameters
    ----------
    core
        The core that decides.
    directory
        For the socket, the lock and the jobs' output; made with mode 0700 if need be.
    clock
        Tells the time.
    environ
        Variables that every job gets, over its own.
    tenant_ramdisk
        The RAM disk that the snapshots of a tenant's jobs may take together, by tenant, ``8G`` style.
    keep_jobs
        True if jobs outlive this scheduler, for another to take them over.
    observer
        Called with every event, when it happened, and its commands, before these are carried out.
    late_observer
        Called likewise once the orders to ranks have been sent, so that no rank waits for it.
    remote
        The other nodes of the core's devices.
    unix_s
        Returns the time of day, in seconds since 1970.

    Attributes
    ----------
    housekeeping
        The tasks that are done when no rank or client waits for this scheduler.
    restore_core
        Called when an event has failed in the midst of the core, before it was observed. It must make the
        core again what the events so far had made of it.
    time_of_day
        Tells the core the time of day, once something needs it.
    local
        The processes of jobs on this machine.

    Raises
    ------
    EnvironmentUnusableError
        If the directory is not private or belongs to another scheduler, or its path is too long.
    """

    def __init__(
        self,
        core: Core,
        directory: Path,
        *,
        clock: Clock | None = None,
        environ: Mapping[str, str] | None = None,
        tenant_ramdisk: Mapping[str, str] | None = None,
        keep_jobs: bool = False,
        observer: Observer = _ignore,
        late_observer: Observer = _ignore,
        remote: RemoteNodes | None = None,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.core = core
        self._keep_jobs = keep_jobs
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._observer = observer
        self._late_observer = late_observer
        self.restore_core: Callable[[], object] = lambda: None
        self.time_of_day = TimeOfDay(core, self.now, self._occur, unix_s)
        self._meter = ThroughputMeter(core)
        self._rejections = Rejections()
        self._slow_decisions = SlowDecisions(lambda: core.allocation.planning.policy)
        self._wake_s: float | None = None
        private_directory(directory, option="--state-dir", parents=True, by_link=True)
        self._lock = lock(directory / LOCK)
        self.context = zmq.Context()
        self._poller = zmq.Poller()

        def environ_of(spec: JobSpec, ranks: int, program: Program) -> dict[str, str]:
            return job_environ(environ or {}, tenant_ramdisk or {}, core.devices, spec, ranks, program)

        self._processes = JobProcesses(core, self._occur, environ_of)
        self._ranks = RankSessions(
            self._processes.send, self._handle, self._processes.greeted, self._processes_of
        )
        found = (self._processes.missing, self._processes.port_found, self._processes.waits_ahead)
        reports = Reports(self._ranks.hear, self._processes.ended, *found)
        try:
            self.local = LocalNode(self.context, directory, self._clock, reports)
            self._processes.begin(self.local, remote, reports, self._ranks.forget)
        except BaseException:
            self.context.destroy()
            os.close(self._lock)
            raise
        self.housekeeping = Housekeeping()
        self._computing = Computing()
        #: The descriptors of all computations, as one descriptor for the poller.
        self._computed = select.epoll()
        self._handlers: dict[zmq.Socket[bytes] | int, Callable[[], object]] = {}
        self.register(self.local.ranks.socket, self.local.ranks.receive)
        self._poller.register(self.local.fileno(), zmq.POLLIN)
        self._poller.register(self._computed.fileno(), zmq.POLLIN)
        self._remote = remote
        if remote is not None:
            if remote.transfers is not None:
                self.register(remote.transfers.fileno(), remote.transfers.reap)
            self.register(remote.socket, remote.receive)
            self.register(remote.authenticator.socket, remote.authenticator.answer)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def end_jobs_when_closed(self) -> None:
        """End the jobs after all when the scheduler is closed: no other could take them over."""
        self._keep_jobs = False

    def close(self) -> None:
        """End all processes of jobs, unless they are kept, and close the sockets. May be called twice."""
        if self.context.closed:
            return
        self._computing.close()
        if not self._keep_jobs:
            self.local.end_all()
        if self._remote is not None:
            if not self._keep_jobs:
                self._remote.dismiss()
            self._remote.close()
        self.context.destroy(linger=0)
        self.local.close()
        self._computed.close()
        os.close(self._lock)

    def register(self, source: zmq.Socket[bytes] | int, handler: Callable[[], object]) -> None:
        """Call ``handler`` whenever ``source``, a socket or descriptor, can be read."""
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN)

    def now(self) -> float:
        """Return the time on the core's clock."""
        return self._clock.now()

    def submit(self, spec: JobSpec, program: Program) -> None:
        """Accept a job. Its processes start when its turn is near, and train when its turn has come."""
        if spec.begin_unix_s:
            self.time_of_day.tell()
        self._handle(Submitted(spec, program))

    def submit_array(self, event: ArraySubmitted) -> None:
        """Accept all jobs of an array, or none."""
        if event.spec.begin_unix_s:
            self.time_of_day.tell()
        self._handle(event)

    def limit_prestart(self, jobs: int) -> None:
        """Set how many jobs may be started beyond those that run, from now on."""
        event = Limited(jobs)
        if self.core.allocation.prestart.limit != jobs and self.now() >= self._rejections.again_s(event):
            self._occur(event)

    def note_room(self, event: NoRoom) -> None:
        """Note which nodes have room for the state of a job by now, and plan with them."""
        self._occur(event)

    def apply_request(self, request: OwnerRequest | DeviceRequest | SettingsChanged | Kept) -> None:
        """Carry out what the owner of a job, or of the scheduler, requests."""
        self._handle(request)

    def note_users(self, event: DevicesUsed) -> bool:
        """Tell the core who else uses devices. Return True if it took that."""
        return self._occur(event)

    def take_over(self, past: Iterable[PastEvent], note: Observer = _ignore) -> None:
        """Continue as the scheduler whose events are ``past``. Look for the jobs' processes.

        ``note`` is called with each event of the past.

        Their ranks greet every new scheduler; what was on its way to or from them is made up for then.
        """
        for event, when_s, commands in past:
            self._guarded(event, note, event, when_s, commands)
            for command in commands:
                if isinstance(command, WakeAt):
                    self._wake_s = command.when_s
        self.time_of_day.look()  # the machine may have been off
        self._processes.find_all()
        if (left := self.core.allocation.planning.computations.unanswered) is not None:
            self._perform(left)

    def set_aside(self, noted: Iterable[Noted]) -> None:
        """Record which past events were left out, so that every later replay leaves them out, too."""
        for note in noted:
            self._occur(note)

    def run(self, until: Callable[[], bool], *, timeout_s: float | None = None) -> bool:
        """Serve until ``until()`` is true. Return True then, or False after ``timeout_s``."""
        ends_s = None if timeout_s is None else self._clock.now() + timeout_s
        if self._remote is not None:
            self._remote.expect_all()
        try:
            while not until():
                if ends_s is not None and self._clock.now() >= ends_s:
                    return False
                self._serve(ends_s)
            return True
        finally:
            self.housekeeping.run()

    def _serve(self, ends_s: float | None) -> None:
        """Wait for something to happen, then handle all that has."""
        ready = dict(self._poller.poll(self._pause_ms(ends_s)))
        for source in ready.keys() & self._handlers.keys():
            self._handlers[source]()
        if self.local.fileno() in ready:
            self.local.reap()
        if self._computed.fileno() in ready:
            self._take_answers()
        self.local.attend()
        if self._remote is not None:
            self._remote.attend()
        self.time_of_day.look()
        now = self._clock.now()
        if self._wake_s is not None and now >= self._wake_s:
            self._wake_s = None
            if not self._occur(Woken()):
                self._wake_s = max(now + _AGAIN_S, self._rejections.again_s(Woken()))
        else:
            self.housekeeping.run_if_due(now, quiet=not ready)

    def _pause_ms(self, ends_s: float | None) -> int | None:
        """Return for how long the scheduler may sleep if nothing happens, in ms; None for ever."""
        now = self._clock.now()
        lost_s = None if self._remote is None else self._remote.next_deadline_s
        moments = (ends_s, self._wake_s, self.local.next_deadline_s, lost_s, self.time_of_day.due_s())
        # Rounded up, or the last fraction of a millisecond would be spent polling without a pause.
        pauses_s = [max(0.0, when_s - now) for when_s in moments if when_s is not None]
        pauses_ms = [min(_PAUSE_AT_MOST_MS, int(pause_s * 1000.0) + 1) for pause_s in pauses_s]
        pauses_ms += [ms for ms in (self.housekeeping.pause_ms, self.local.pause_ms) if ms is not None]
        return min(pauses_ms, default=None)

    def _handle(self, event: Event) -> None:
        """Let the core decide on ``event``, and carry out its commands. Errors of the core change nothing."""
        now = self._clock.now()
        encode(event)  # what the core may see, the journal can give back
        try:
            commands = self.core.handle(event, now)
        except GpusliceError:
            raise
        except Exception as error:
            raise self._unforeseen(event, error) from error
        slow = self._slow_decisions.note(event, self._clock.now() - now, now)
        self._rejections.accepted(event)
        self._observer(event, now, commands)
        for command in commands:
            if isinstance(command, Tell):
                self._guarded(command, self._ranks.tell, command)
            elif isinstance(command, WakeAt):  # before events that follow at once from others
                self._wake_s = command.when_s
        self._guarded(event, self._late_observer, event, now, commands)
        self.housekeeping.happened(now)
        for command in commands:
            self._guarded(command, self._perform, command)
        for found in (self._meter.note(event, now), slow):
            if found is not None:
                self._occur(found)

    def _processes_of(self, job: str, rank: int) -> list[int]:
        """Return the processes of ``job`` that are its rank or wait to be."""
        found = self.core.jobs.get(job)
        return [] if found is None else processes_of(found, rank)

    def _occur(self, event: Event) -> bool:
        """Handle an event that is no request. Return True if the core took it; rejections are logged."""
        try:
            self._handle(event)
        except JournalError:
            raise
        except UnforeseenError:
            return False  # it is in the log
        except GpusliceError as error:
            if self._rejections.count(event, self.now()):
                _log.warning("rejected %s of %s: %s", named(event), job_of(event) or "nobody", error)
            return False
        return True

    def _unforeseen(self, event: Event, error: Exception) -> UnforeseenError:
        """Undo what the core did of ``event`` before it failed, and report it. Return the error to raise."""
        is_told = self._rejections.count(event, self.now())
        if is_told:
            _log.exception("%s of %s failed in the core", named(event), job_of(event) or "nobody")
        told = shortened(f"{type(error).__name__}: {error}", _REASON_CHARACTERS)
        self._guarded(event, self.restore_core)
        if is_told and not isinstance(event, Noted):
            self._occur(Noted("rejected", job_of(event), {"event": named(event), "reason": told}))
        return UnforeseenError(f"{named(event)} failed: {told}", "this is a bug; scheduler.jsonl says more")

    def _guarded(self, what: Event | Command, act: Callable[..., object], *words: object) -> None:
        """Call ``act``, which follows from ``what``. Log its failure: only a ``JournalError`` is raised."""
        try:
            act(*words)
        except JournalError:
            raise
        except Exception:  # noqa: BLE001 - logged; the event has happened, and others wait
            _log.exception("what follows from %s could not be done", type(what).__name__)

    def _perform(self, command: Command) -> None:
        match command:
            case Tell() | WakeAt():
                pass  # has been done
            case Bring() | FindPort() | StartAhead() | GiveUpAhead() | Launch() | Kill():
                self._processes.perform(command)
            case Compute():
                self._compute(command)
            case Notice():
                level = logging.DEBUG if command.what in _EXPECTED else logging.WARNING
                _log.log(level, "%s %s %s", command.job, command.what, command.details)
                self._handle(Noted(command.what, command.job, command.details))

    def _compute(self, command: Compute) -> None:
        try:
            self._computed.register(self._computing.begin(command), select.EPOLLIN)
        except OSError as error:
            told = f"{command.task.function} cannot be begun: {error}"
            _log.warning("%s", told)
            self._occur(Computed(command.number, error=told))

    def _take_answers(self) -> None:
        ready = {descriptor for descriptor, _ in self._computed.poll(0)}
        for answer in self._computing.reap(ready):
            if answer.error:
                _log.warning("%s", answer.error)
            self._occur(answer)
