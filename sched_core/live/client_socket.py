"""The socket where users submit jobs and ask about them: a second ROUTER socket beside the ranks' one.

Answers come from what the core knows. A client that waits for a job is answered after the event that ended
it. A client that connects and says nothing, or leaves before the answer, costs nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import zmq
from msgspec.structs import replace

from gpuslice.errors import (
    EnvironmentUnusableError,
    GpusliceError,
    IllegalTransitionError,
    RemoteProtocolError,
    UsageError,
)
from gpuslice.sched_core.core.device_verbs import answer_to, event_of
from gpuslice.sched_core.job import DEFAULTS, JobDefaults
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.journal.event_listing import history
from gpuslice.sched_core.journal.journal import Journal, JournalError
from gpuslice.sched_core.lifecycle.events import (
    Adjusted,
    Cancelled,
    Held,
    Moved,
    OwnerRequest,
    Released,
    Requeued,
    Weighted,
)
from gpuslice.sched_core.nodes.curve import KeyAuthenticator, scheduler_keys
from gpuslice.sched_core.nodes.endpoint import CLIENT_SOCKET, bind, bind_tcp, check_sender, receive
from gpuslice.types import job_id, shortened
from gpuslice.verbs import (
    Accepted,
    AcceptedArray,
    Adjust,
    Admission,
    Answer,
    CallOff,
    Cancel,
    DevicesChanged,
    DeviceVerb,
    Done,
    Down,
    Drain,
    Ended,
    Events,
    Failed,
    LogPart,
    Logs,
    Migrate,
    Moving,
    Pause,
    ReadLog,
    Request,
    Requeue,
    Reserve,
    Resume,
    Set,
    Settings,
    Status,
    Submit,
    SubmitArray,
    Suspend,
    Undrain,
    Unpause,
    Unreserve,
    Wait,
    Weight,
    decode_request,
    encode,
)

from .job_logs import log_files, part
from .keeping import Keeping
from .scheduler import Scheduler
from .status import Overview
from .submission import check, make_array, make_spec

_LINGER_MS = 1000
_REQUESTS_AT_ONCE = 20
#: A client that waits asks again every two seconds. A client that has not asked for so long has gone.
_FORGET_S = 60.0
_UNLESS = "give it more time, or leave out --guaranteed"
#: A client that has asked: the socket, and the client's identity there.
_Requester = tuple[zmq.Socket[bytes], bytes]
_log = logging.getLogger(__name__)


def _no_settings(words: Sequence[str]) -> Settings:
    raise UsageError("this scheduler has no settings that can be changed", "start another one")


class ClientSocket:
    """The socket that serves users within the loop of ``scheduler``.

    Parameters
    ----------
    scheduler
        Carries requests out.
    directory
        The scheduler's directory.
    journal
        The scheduler's journal.
    overview
        Makes the answers on the status of jobs and devices.
    tcp
        The address to listen at besides, and the directory of keys for that.
    defaults
        The times of jobs that are submitted without them.
    keeping
        Keeps all jobs for the next scheduler (``down --keep``). None: that is not possible here.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        directory: Path,
        journal: Journal,
        overview: Overview,
        *,
        tcp: tuple[str, Path] | None = None,
        defaults: JobDefaults = DEFAULTS,
        keeping: Keeping | None = None,
    ) -> None:
        self.defaults, self._keeping = defaults, keeping
        self._scheduler = scheduler
        self._journal = journal
        #: Called before a job is moved; raises if the move is known to be impossible.
        self.admit_move: Callable[[Moved], object] = lambda request: None
        #: Changes settings and returns all. Replaced if they can be changed.
        self.change_settings: Callable[[Sequence[str]], Settings] = _no_settings
        self._overview = overview
        self._sockets = [bind(scheduler.context, f"ipc://{directory / CLIENT_SOCKET}")]
        #: The clients that wait for the end of a job, by job, and when each asked last, in this order.
        self._awaiting_end: dict[str, dict[_Requester, float]] = {}
        #: The clients that wait to hear if a job's deadline is guaranteed, likewise.
        self._awaiting_guarantee: dict[str, dict[_Requester, float]] = {}
        #: The clients that wait for the end of the scheduler.
        self._awaiting_shutdown: list[_Requester] = []
        if tcp is not None:
            endpoint, keys = tcp
            self._authenticator = KeyAuthenticator(scheduler.context, keys)
            self._sockets.append(bind_tcp(scheduler.context, endpoint, scheduler_keys(keys)))
            scheduler.register(self._authenticator.socket, self._authenticator.answer)
        for socket in self._sockets:
            scheduler.register(socket, partial(self._receive, socket))

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The addresses where users can connect."""
        found = [socket.getsockopt(zmq.LAST_ENDPOINT) for socket in self._sockets]
        return tuple(one.rstrip(b"\0").decode() for one in found if isinstance(one, bytes))

    @property
    def shut_down(self) -> bool:
        """True if the scheduler was told to leave, and nothing is left of its jobs or all are kept."""
        if self._keeping is not None and self._keeping.done:
            return True
        return bool(self._awaiting_shutdown) and all(job.over for job in self._scheduler.core.jobs.values())

    def notify(self) -> None:
        """Answer the clients whose requests to wait are fulfilled."""
        for name in list(self._awaiting_end):
            job = self._scheduler.core.jobs[name]
            if job.over:
                ended = Ended(job=self._overview.job(job, self._scheduler.now()))
                for requester in self._awaiting_end.pop(name):
                    self._send(requester, ended)
        for name in list(self._awaiting_guarantee):
            job = self._scheduler.core.jobs[name]
            if job.guaranteed is not None or job.over:
                for requester in self._awaiting_guarantee.pop(name):
                    self._send(requester, _admission(job))

    def close(self) -> None:
        """Answer the clients that wait for the scheduler's end, and close the sockets."""
        for requester in self._awaiting_shutdown:
            self._send(requester, Done())
        for socket in self._sockets:
            socket.close(linger=_LINGER_MS)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(_REQUESTS_AT_ONCE):
            if (message := receive(socket)) is None:
                return
            identity, frames = message
            requester = (socket, identity)
            answer: Answer | None
            try:
                if not frames:
                    raise RemoteProtocolError(
                        "a message of too many frames or bytes", "send version and body"
                    )
                if socket is self._sockets[0]:  # the authenticator has checked all others
                    check_sender(frames[0])
                answer = self._answer(requester, decode_request([frame.bytes for frame in frames]))
            except JournalError:
                raise  # not the client's fault, and the end of this scheduler
            except GpusliceError as error:
                answer = Failed(error=error.message, remedy=error.remedy, exit_code=error.exit_code)
            except Exception as error:  # noqa: BLE001 - a request is no reason to end; told and logged
                _log.exception("a request failed")
                told = f"the request failed: {type(error).__name__}: {error}"
                answer = Failed(error=told, remedy="this is a bug; scheduler.jsonl says more", exit_code=1)
            if answer is not None:
                self._send(requester, answer)

    def _answer(self, requester: _Requester, request: Request) -> Answer | None:
        """Do what ``request`` asks and return the answer. Return None if the answer comes later."""
        match request:
            case Submit():
                return self._submit(request)
            case SubmitArray():
                return self._submit_array(request)
            case Status():
                self._journal.save_heartbeats()  # no step that is shown is forgotten
                now_s = self._scheduler.now()
                return self._overview.status(request.after, now_s, self.endpoints, fold=request.fold)
            case Wait():
                self._wait(requester, self._awaiting_end.setdefault(self._known(request.job).id, {}))
                return None
            case Admission():
                self._wait(requester, self._awaiting_guarantee.setdefault(self._known(request.job).id, {}))
                return None
            case Logs():
                return log_files(self._scheduler.local.processes.log, self._known(request.job).id)
            case ReadLog():
                job = self._known(request.job).id
                path = self._scheduler.local.processes.log(job, "err" if request.err else "out")
                return LogPart(data=part(path, request.offset))
            case Cancel():
                self._known(request.job)
                return self._changed(Cancelled(request.job, "cancelled by its owner"))
            case Suspend():
                self._known(request.job)
                return self._changed(Held(request.job))
            case Resume():
                self._known(request.job)
                return self._changed(Released(request.job))
            case Adjust():
                self._known(request.job)
                return self._changed(
                    Adjusted(request.job, request.weight, request.priority, request.time_limit_s)
                )
            case Set():
                return self.change_settings(request.settings)
            case Requeue():
                self._known(request.job)
                return self._changed(Requeued(request.job, request.fresh))
            case Migrate():
                self._known(request.job)
                return self._move(Moved(request.job, tuple(request.devices)))
            case Weight():
                self._known(request.job)
                return self._changed(Weighted(request.job, request.weight))
            case Pause() | Unpause() | Drain() | Undrain() | Reserve() | Unreserve():
                return self._change_devices(request)
            case Events():
                return history(self._journal, request.after)
            case Down():
                if request.keep:
                    self._keep(requester)
                else:
                    self._down(requester, drain=request.drain)
                return None
            case CallOff():
                self._call_off()
                return Done()

    def _wait(self, requester: _Requester, asked_s: dict[_Requester, float]) -> None:
        """Add ``requester`` to the clients that wait, and drop clients that have gone."""
        now_s = self._scheduler.now()
        asked_s.pop(requester, None)
        asked_s[requester] = now_s
        while asked_s[first := next(iter(asked_s))] < now_s - _FORGET_S:
            del asked_s[first]
        self.notify()

    def _changed(self, request: OwnerRequest) -> Done:
        try:
            self._scheduler.apply_request(request)
        except IllegalTransitionError as error:
            # The error's remedy is the job's history, which helps only to find a bug of ours.
            raise UsageError(error.message, "`gpuslice ps` shows how it stands") from error
        return Done()

    def _change_devices(self, request: DeviceVerb) -> DevicesChanged:
        """Pause, drain or reserve devices, or end that."""
        state = self._scheduler.core.state
        event, before = event_of(state, request, time.time()), state.closed.reservations
        self._scheduler.apply_request(event)
        return answer_to(state, event, before)

    def _move(self, request: Moved) -> Moving:
        """Move a job, and return what is expected of it by what was known before."""
        core = self._scheduler.core
        job, costs = core.jobs[request.job], core.state.switch_costs
        present, nbytes = job.lease, costs.state_bytes(job)
        numbers = {str(device): number for number, device in enumerate(core.devices)}
        wish = [numbers[name] for name in request.devices if name in numbers]
        expected_s = costs.expected_s(job, wish)
        self.admit_move(request)
        self._changed(request)
        names = tuple(str(core.devices[device]) for device in present)
        return Moving(
            job=job.id, present=names, to=request.devices, nbytes=nbytes or None, expected_s=expected_s
        )

    def _submit(self, request: Submit) -> Accepted:
        self._check(request)
        name = self._free_name(request)
        spec = make_spec(request, name, self._scheduler.now(), self.defaults)
        self._scheduler.submit(spec, Program(request.argv, request.directory, dict(request.environ or {})))
        return Accepted(job=name)

    def _submit_array(self, request: SubmitArray) -> AcceptedArray:
        self._check(request)
        event = make_array(request, self._free_name(request), self._scheduler.now(), self.defaults)
        for point in event.points:
            self._check_free(point.id)
        self._scheduler.submit_array(event)
        return AcceptedArray(array=event.spec.id, jobs=tuple(point.id for point in event.points))

    def _check(self, request: Submit | SubmitArray) -> None:
        if self._awaiting_shutdown:
            raise EnvironmentUnusableError("the scheduler is about to leave", "`gpuslice up` starts another")
        check(request, self._scheduler.core.devices)

    def _free_name(self, request: Submit | SubmitArray) -> str:
        jobs, logged = self._scheduler.core.jobs, self._scheduler.local.processes.logged
        arrays = {job.spec.array for job in jobs.values()}
        if request.name is not None:
            self._check_free(request.name)
            if request.name in arrays:
                raise UsageError(f"there is an array {request.name!r} already", "choose another name")
            return job_id(request.name)
        number = len(jobs) + 1
        while (name := job_id(f"{request.stem}-{number}")) in jobs or name in arrays or logged(name):
            number += 1
        return name

    def _check_free(self, name: str) -> None:
        """Raise ``UsageError`` if ``name`` is a job's id already, or cannot be."""
        if name in self._scheduler.core.jobs:
            raise UsageError(f"there is a job {name!r} already", "choose another name")
        if self._scheduler.local.processes.logged(job_id(name)):
            raise UsageError(
                f"there are logs of a job {name!r} that the journal does not know",
                "choose another name, or move them out of the scheduler's logs",
            )

    def _down(self, requester: _Requester, *, drain: bool) -> None:
        if drain:
            self._check_can_drain()
        self._awaiting_shutdown.append(requester)
        # Jobs that are not started come first, or each would be started in the place of the one before.
        for job in sorted(self._scheduler.core.jobs.values(), key=lambda job: job.command.launched):
            if not drain and (not job.state.ended or (job.may_restart and not job.processes_gone)):
                self._scheduler.apply_request(Cancelled(job.id, "the scheduler was taken down"))
            elif job.held and not job.state.ended:
                self._scheduler.apply_request(Released(job.id))  # or it would never finish

    def _keep(self, requester: _Requester) -> None:
        if self._keeping is None:
            raise UsageError("this scheduler keeps no jobs", "use `gpuslice down`")
        self._awaiting_shutdown.append(requester)
        self._keeping.begin(self._cannot_leave)

    def _call_off(self) -> None:
        if self._keeping is None or not self._keeping.call_off():
            raise UsageError("no `gpuslice down --keep` is under way", "`gpuslice ps` shows how jobs stand")

    def _cannot_leave(self, error: GpusliceError) -> None:
        """Tell those who wait for the scheduler's end that it does not leave."""
        for requester in self._awaiting_shutdown:
            self._send(requester, Failed(error=error.message, remedy=error.remedy, exit_code=error.exit_code))
        self._awaiting_shutdown.clear()

    def _check_can_drain(self) -> None:
        """Raise ``UsageError`` if a job can never finish, because its devices are closed without an end."""
        core = self._scheduler.core
        closed, jobs = core.state.closed, core.jobs.values()
        for job in jobs:
            if not job.state.ended and job.shut_out and (devices := job.closed & closed.endless):
                raise UsageError(
                    f"job {job.id} cannot finish: {closed.reason(job, min(devices), self._scheduler.now())}",
                    "open the device, cancel the job, or leave out --drain",
                )

    def _known(self, name: str) -> Gang:
        job = self._scheduler.core.jobs.get(name)
        if job is None:
            raise UsageError(f"there is no job {name!r}", "`gpuslice ps` lists them")
        return job

    def _send(self, requester: _Requester, answer: Answer) -> None:
        socket, identity = requester
        if isinstance(answer, Failed):
            answer = replace(answer, error=shortened(answer.error), remedy=shortened(answer.remedy))
        try:
            socket.send_multipart([identity, *encode(answer)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The client is gone, or does not read: then the answer is not wanted.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            level = logging.DEBUG if error.errno == zmq.EHOSTUNREACH else logging.INFO
            _log.log(level, "an answer could not be sent: %s", error)


def _admission(job: Gang) -> Answer:
    if job.guaranteed is False and job.state.ended:
        return Failed(error=f"{job.id} was refused: {job.verdict.reason}", remedy=_UNLESS, exit_code=2)
    if job.guaranteed is None and job.state in (JobState.FAILED, JobState.CANCELLED):
        told = f"{job.id} {job.state.value} before its deadline could be guaranteed: {job.verdict.reason}"
        return Failed(error=told, remedy=f"`gpuslice logs {job.id} --err` may tell more", exit_code=2)
    return Done()
