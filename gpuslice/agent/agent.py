"""The controller of a scheduled job: parks, moves and resumes it as ordered (docs/architecture.md).

A rank waits for its first lease right after ``import torch``, before it has any state. If the scheduler
dies, a running rank runs on and a parked rank stays parked. Both greet the next scheduler.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from gpuslice.agent import start_ahead
from gpuslice.agent.boundary_watchdog import BoundaryWatchdog
from gpuslice.agent.gpu_names import GpuNames
from gpuslice.agent.import_ahead import import_ahead
from gpuslice.agent.orders import Orders, Phase
from gpuslice.agent.peak_memory import PeakMemory
from gpuslice.agent.place import AT_ONCE_S, Place
from gpuslice.agent.refusals import STILL_PARKED, refused
from gpuslice.agent.scheduler_link import Link
from gpuslice.agent.unleased_memory import UnleasedMemory
from gpuslice.errors import ConfigError, EnvironmentUnusableError, GpusliceError, UsageError
from gpuslice.profiler.skew import Skew
from gpuslice.runtime import foreign_processes, logged_losses
from gpuslice.runtime.ending import end, leave_parked, say, undisturbed, whole_or_ended
from gpuslice.runtime.process import Membership
from gpuslice.runtime.runtime import Runtime
from gpuslice.runtime.stopping import Act, Wish
from gpuslice.runtime.threads.main_thread import MainThreadStuckError
from gpuslice.runtime.trainable import report_skew
from gpuslice.types import DeviceName
from gpuslice.wire import (
    PROTOCOL_VERSION,
    Beside,
    Bye,
    Dismiss,
    FromAgent,
    Hello,
    Profiled,
    Progress,
    Queued,
    Rejected,
    Replaced,
    Resume,
    Resumed,
    Suspend,
    Suspended,
    ToAgent,
    Welcome,
    Withdraw,
)

#: Environment variable with the leased device, for child processes.
_LEASE = "GPUSLICE_LEASE"
_BESIDE = "submit trainings that are to run at the same time as jobs of their own"


class Agent:
    """A controller that carries out the orders of the scheduler at ``settings.socket``.

    Parameters
    ----------
    runtime
        The job.
    replaces
        Id of the parent process, which was this rank and has a lease, if this process trains now; else 0.

    Raises
    ------
    ConfigError
        If the socket is not local or the job has no name.
    """

    def __init__(self, runtime: Runtime, *, replaces: int = 0) -> None:
        settings, rank_identity = runtime.settings, runtime.identity
        if not settings.socket.startswith("ipc://"):
            raise ConfigError(f"{settings.socket!r} is not a local socket", "give an ipc:// endpoint")
        if not settings.job:
            raise ConfigError("a scheduled job needs a name", "set GPUSLICE_JOB")
        self._runtime = runtime
        self._suspension = runtime.suspension
        self._boundaries = runtime.boundaries
        self._orders = Orders(runtime.boundaries)
        self._last_suspended: Suspended | None = None
        self._skew: Skew | None = None
        self._bye: Bye | None = None
        self._began, self._complaint = False, ""
        self._replaces = replaces
        self._place = Place(self._orders, runtime.boundaries, ask=self._ask_for_place, enter=self._enter)
        self._unanswered = False  # True from a Hello until a message other than Welcome comes
        self._watch = BoundaryWatchdog(runtime.boundaries, lambda: self._orders.asked)
        identity = f"{settings.job}:{rank_identity.rank}:{os.getpid()}"
        self._unleased = UnleasedMemory()
        self._memory = PeakMemory()
        self._names = GpuNames()
        runtime.suspension.gate.carry_out = self._names.in_other_threads
        #: The device to which the script's own device names refer.
        self._first = runtime.suspension.in_use.name
        self._link = Link(
            settings.socket,
            identity,
            greeting=self._greeting,
            progress=self._progress,
            handle=self._handle,
        )

    def start(self) -> None:
        """Connect to the scheduler. Wait for the first lease, unless the parent process has one."""
        if self._runtime.settings.elastic:
            self._boundaries.leave_to_script()  # ranks that begin at different times count alike
        _ = self._runtime.storage.ramdisk
        if self._replaces:
            self._place.ask_as_child()
            self._link.start()
            self._begin(os.environ[_LEASE])
            return
        if start_ahead.is_ahead():
            import_ahead()
            start_ahead.wait()
        self._link.start()
        if self._orders.quiet_for(AT_ONCE_S):
            import_ahead()
        order = self._orders.await_order()
        if isinstance(order, Dismiss):
            sys.exit()
        assert order is not None  # no signal is held back: there is no state yet
        self._orders.run_on()
        self._begin(order.device)
        self._enter(order)

    def _begin(self, device: str) -> None:
        self._take_device(device)
        self._note_lease(device)
        self._orders.listen()
        self._watch.start()
        if self._runtime.identity.rank == 0:
            report_skew(self._profiled, self._boundaries.thread)

    def _take_device(self, device: str) -> None:
        in_use = self._suspension.in_use
        in_use.take_lease(DeviceName.parse(device), self._runtime.identity.local_rank)
        self._first = in_use.name

    def at_boundary(self, boundary: int) -> Sequence[int]:
        """Suspend if an order is pending, and wait for the next lease. Return the signals held back.

        The script's signal handlers run once its state is back. A signal that asks the script to end
        brings the state back without a lease. If the script goes on, it parks at the next boundary.
        """
        if self._place.pass_boundary():
            return ()
        if not self._began:
            self._began = True
            self._send(self._progress())  # the end of the set-up decides what counts as service
        leased = self._orders.phase is Phase.RUNNING
        act = self._suspension.at_boundary(Wish.PARK if leased else Wish.PARK_AGAIN)
        if act is Act.PASS_BY and self._runtime.identity.world_size > 1:
            self._report(self._orders.pass_by(boundary))
        if act is not Act.PARK or not self._orders.arrive(boundary):
            return ()
        late: list[int] = []
        try:
            late = self._suspension.main_thread.park(partial(self._park, boundary, leased=leased))
            self._watch.obstacle = ""
        except MainThreadStuckError as error:
            self._watch.obstacle = f"at which it can park: {error.message}"
            self._run_on(error, leased=leased)
        return late

    def _park(self, boundary: int, *, leased: bool) -> list[int]:
        """Suspend, and stay parked until the next lease. Return the signals held back meanwhile."""
        late: list[int] = []
        whole = whole_or_ended(lambda: self._suspension.whole)
        with undisturbed(self._orders.interrupt, late=late), whole:
            if self._suspend(boundary, leased=leased):
                self._stay_parked()
        return late

    def _ask_for_place(self) -> None:
        self._link.silent = False
        foreign_processes.become_rank()
        self._report(self._greeting())

    def _enter(self, order: Resume) -> None:
        """Start to train under ``order``, a lease that needs no restore, and report it to the scheduler."""
        self._take_part(order)
        if order.device != self._place.device:
            self._take_device(order.device)
        self._note_lease(order.device)
        self._send(Resumed(epoch=order.epoch, boundary=self._boundaries.count, stages_s={}))

    def _profiled(self, skew: Skew) -> None:
        """Report what the optimizers train, after their first steps. Placement may depend on it."""
        self._skew = skew
        self._report(self._trained())

    def _trained(self) -> list[Profiled]:
        if self._skew is None:
            return []
        tensors, nbytes, largest_bytes = self._skew.tensors, self._skew.bytes, self._skew.largest_bytes
        epoch = self._orders.epoch
        return [Profiled(epoch=epoch, tensors=tensors, nbytes=nbytes, largest_bytes=largest_bytes)]

    def _note_lease(self, device: str) -> None:
        """Record the leased device, also in the environment: a child process may be the one that trains."""
        os.environ[_LEASE] = self._place.device = device

    def finish(self) -> None:
        """Send Bye with the last boundary and step, if this process is a rank."""
        if self._link.silent:
            return
        boundaries = self._boundaries
        self._bye = Bye(epoch=self._orders.epoch, boundary=boundaries.count, step=boundaries.steps)
        with suppress(EnvironmentUnusableError):  # the script has ended, even if no scheduler hears of it
            self._link.send(self._bye)

    def end_threads(self) -> None:
        """Send the messages still queued, and end the I/O thread and the watchdog."""
        self._watch.stop()
        self._link.close()

    def _suspend(self, boundary: int, *, leased: bool) -> bool:
        """Suspend the job, and report that if ``leased``. Return False if the job could not be suspended."""
        try:
            record = self._suspension.suspend(explicit=self._boundaries.explicit)
        except GpusliceError as error:
            if not self._suspension.whole:
                raise
            self._run_on(error, leased=leased)
            return False
        self._last_suspended = Suspended(
            epoch=self._orders.epoch,
            boundary=boundary,
            step=self._boundaries.steps,
            nbytes=record.bytes_copied,
            stages_s=record.suspend_stages_s(),
            tensors=record.storages,
            route=record.route,
            bound=self._suspension.obstacle_to_moves(),
            restartable=self._suspension.switch.restartable,
            restartable_later=self._suspension.restartable_later,
        )
        if leased:
            self._send(self._last_suspended)
        return True

    def _run_on(self, error: GpusliceError, *, leased: bool) -> None:
        """Continue the training after a suspend that failed with ``error``, and report the error."""
        if leased or error.message != self._complaint:  # without a lease, each boundary tries again
            say(error.message, error.remedy)
        self._complaint = error.message
        if leased:
            self._memory.begin(self._suspension.in_use.name)
            self._orders.run_on()
            self._refuse(error, running=True)
        else:
            self._orders.take_leave()

    def _stay_parked(self) -> None:
        while True:
            with self._suspension.offering():
                order = self._orders.await_order()
            if isinstance(order, Dismiss):
                self._end_parked()
            elif self._come_back(order):
                return

    def _come_back(self, order: Resume | None) -> bool:
        """Resume under ``order``, or on the last device without one. Return False if the job stays parked."""
        try:
            self._names.pause()
            target = self._suspension.in_use.gpus.inside(DeviceName.parse(order.device)) if order else None
            record = self._suspension.resume(target)
            self._names.follow(self._first, self._suspension.in_use.name)
        except GpusliceError as error:
            if self._suspension.whole:
                end(error)
            if order is None or not isinstance(error, STILL_PARKED):
                raise
            self._refuse(error, running=False)
            return False
        if order is None:
            self._orders.take_leave()
            return True
        self._last_suspended = None
        self._memory.begin(self._suspension.in_use.name)
        self._take_part(order)
        self._orders.run_on()
        self._note_lease(order.device)
        stages_s = {"parked_s": record.parked_s, **record.resume_stages_s()}
        self._send(Resumed(epoch=order.epoch, boundary=self._boundaries.count, stages_s=stages_s))
        return True

    def _take_part(self, order: Resume) -> None:
        """Note which ranks of an elastic job train together from now on."""
        if order.width:
            self._runtime.membership = Membership(order.world, order.width)

    def _end_parked(self) -> NoReturn:
        """End this parked process and drop its state: the job has ended well without this rank."""
        self._runtime.write_report()
        self._runtime.storage.store.close(keep=False)
        self.finish()
        self.end_threads()
        leave_parked()

    def _refuse(self, error: GpusliceError, *, running: bool) -> None:
        self._send(refused(error, self._orders.epoch, self._boundaries.count, running=running))

    def _report(self, messages: Sequence[FromAgent]) -> None:
        for message in messages:
            self._send(message)

    def _send(self, message: FromAgent) -> None:
        """Send ``message``, or end the job if the link is gone: no order could reach the job any more."""
        try:
            self._link.send(message)
        except GpusliceError as error:
            if self._suspension.whole:
                end(error)
            raise

    # The methods below run in the I/O thread.

    def _greeting(self) -> list[FromAgent]:
        identity, self._unanswered = self._runtime.identity, True
        hello = Hello(
            version=PROTOCOL_VERSION,
            job=self._runtime.settings.job,
            rank=identity.rank,
            world_size=identity.world_size,
            pid=os.getpid(),
            boundary=self._boundaries.count,
            epoch=self._orders.epoch,
            parked=self._orders.phase is not Phase.RUNNING,
            replaces=self._replaces,
            attempt=self._runtime.settings.attempt,
        )
        last = (said for said in (self._last_suspended, self._bye) if said is not None)
        return [hello, *self._trained(), *last]

    def _progress(self) -> Progress:
        boundaries, leased, attached = self._boundaries, self._suspension.in_use.name, self._runtime.attached
        logged_losses.follow_libraries()
        if self._orders.phase is Phase.RUNNING:
            self._memory.look(leased, boundaries.steps)
        return Progress(
            epoch=self._orders.epoch,
            boundary=boundaries.count,
            step=boundaries.steps,
            stuck=self._watch.stuck,
            loss=logged_losses.newest(),
            went_on_from=boundaries.went_on_from,
            unleased=self._unleased.look(
                leased, self._suspension.in_use.gpus, lambda: self._orders.phase is Phase.RUNNING
            ),
            peak_bytes=self._memory.most_bytes,
            samples=0 if attached is None else attached.samples,
            saved=self._runtime.checkpoints.saved,
        )

    def _handle(self, message: ToAgent) -> Sequence[FromAgent]:
        unanswered = self._unanswered
        self._unanswered = unanswered and isinstance(message, Welcome)
        match message:
            case Resume():
                self._runtime.for_restart = False
                return self._orders.resume(message)
            case Suspend():
                self._runtime.for_restart = message.for_restart
                return self._orders.suspend(message)
            case Dismiss():
                return self._orders.dismiss(message)
            case Replaced():
                self._link.silent = True
                self._place.lose()
                foreign_processes.leave_rank()
                self._suspension.memory_limit.end()
            case Rejected() if self._link.silent:
                pass  # it answers a message from before this process was replaced
            case Withdraw():
                answers = self._place.withdraw(message)
                self._link.silent = self._link.silent or bool(answers)
                return answers
            case Beside():
                self._orders.release()
                say(f"process {message.behind}, beside which this one trains, cannot be suspended", _BESIDE)
            case Queued():
                self._place.stand_in_line()
                say(f"this process waits for the end of process {message.behind} of the same job", _BESIDE)
            case Rejected() if unanswered and self._orders.phase is Phase.WAITING:
                self._orders.refuse(UsageError(message.error, message.remedy))
            case Rejected() if unanswered and self._replaces:
                self._link.silent = True
                self._orders.release()
                say(f"this process trains beside the job's rank and cannot be suspended: {message.error}")
            case Rejected():
                say(f"the scheduler rejected a message: {message.error}", message.remedy)
            case Welcome() if message.version != PROTOCOL_VERSION:
                say(f"the scheduler speaks protocol {message.version}, this job {PROTOCOL_VERSION}")
        return []
