"""``gpuslice.Client``: the scheduler's verbs from Python. The command line uses it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import msgspec
import zmq

from gpuslice import config, verbs
from gpuslice.client import connection
from gpuslice.clock import MonotonicClock
from gpuslice.errors import (
    EnvironmentUnusableError,
    GpusliceError,
    RemoteProtocolError,
    UnforeseenError,
    UsageError,
)
from gpuslice.files import working_directory
from gpuslice.job_request import ArrayRequest, JobRequest
from gpuslice.types import checked, is_word
from gpuslice.verbs import (
    Answer,
    DevicesChanged,
    EventInfo,
    JobInfo,
    LogFiles,
    Moving,
    Request,
    SchedulerStatus,
    SettingInfo,
)
from gpuslice.wire import MAX_MESSAGE_BYTES

#: How often a client that waits looks whether there is still a scheduler, and asks again.
_LOOK_AGAIN_MS = 2000
_A = TypeVar("_A")
_M = TypeVar("_M", verbs.Submit, verbs.SubmitArray)
_T = TypeVar("_T", bound=JobRequest)
_R = TypeVar("_R")
_Keywords = ParamSpec("_Keywords")
_ERRORS: dict[int, type[GpusliceError]] = {
    1: UnforeseenError,
    2: UsageError,
    3: EnvironmentUnusableError,
}


def _by_keywords(
    make: Callable[_Keywords, _T],
) -> Callable[
    [Callable[[Client, Sequence[str], _T], _R]],
    Callable[Concatenate[Client, Sequence[str], _Keywords], _R],
]:
    """Return a decorator: the method then takes keywords, from which ``make`` builds its request."""

    def change(
        method: Callable[[Client, Sequence[str], _T], _R],
    ) -> Callable[Concatenate[Client, Sequence[str], _Keywords], _R]:
        @wraps(method)
        def called(
            self: Client, words: Sequence[str], /, *none: _Keywords.args, **fields: _Keywords.kwargs
        ) -> _R:
            return method(self, words, make(*none, **fields))

        # For `help` and shells. Type checkers have the types from the struct.
        default = cast(Callable[[], JobRequest], make)()
        taken = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("self", "words")]
        taken += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(default, name))
            for name in default.__struct_fields__
        ]
        vars(called)["__signature__"] = inspect.Signature(taken)
        return called

    return change


class Client:
    """A client of a scheduler; a context manager.

    Parameters
    ----------
    state_dir
        The scheduler's directory, if not ``$GPUSLICE_STATE_DIR`` or else the XDG state directory's.
    connect
        Instead, ``tcp://HOST:PORT`` of a scheduler elsewhere; by default ``$GPUSLICE_CONNECT``.
    curve_keys
        Directory of keys for that; by default ``$GPUSLICE_CURVE_KEYS``.

    Raises
    ------
    EnvironmentUnusableError
        From every verb, if no scheduler runs there.
    UsageError
        From every verb, if what it asks for is impossible.
    """

    def __init__(
        self,
        state_dir: str | Path | None = None,
        *,
        connect: str | None = None,
        curve_keys: str | Path | None = None,
    ) -> None:
        self._connection = connection.find(state_dir, connect, curve_keys)
        self._context = zmq.Context()
        self._clock = MonotonicClock()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)

    @_by_keywords(JobRequest)
    def submit(self, words: Sequence[str], request: JobRequest) -> str:
        """Hand in a job and return its id.

        Parameters
        ----------
        words
            As after ``gpuslice run``: a script and its arguments, ``-m module``, or ``--`` and a command.
        request
            The fields of ``JobRequest``, as keywords. With ``guaranteed``, ``submit`` returns once it is
            decided whether the deadline can be met. That takes the job's first mini-batches if ``expected_s``
            is not stated (docs/submit.md, Deadlines).
        """
        message = _message(words, request, verbs.Submit)
        job = self._ask(message, verbs.Accepted).job
        if request.guaranteed:
            self._ask(verbs.Admission(job=job), verbs.Done)
        return job

    @_by_keywords(ArrayRequest)
    def submit_array(self, words: Sequence[str], request: ArrayRequest) -> tuple[str, ...]:
        """Hand in many jobs of one command and return their ids. All are accepted, or none.

        Parameters
        ----------
        words
            As for ``submit``, with ``{}`` for the number of a job, or ``{lr}`` for its value of ``lr``.
        request
            The fields of ``ArrayRequest``, as keywords: ``array="0-99"``, or ``grid={"lr": "0.1,0.01"}``.
        """
        return self._ask(_message(words, request, verbs.SubmitArray), verbs.AcceptedArray).jobs

    @property
    def directory(self) -> Path | None:
        """The state directory through which the scheduler is reached. None for a scheduler reached by TCP."""
        return self._connection.directory

    def check_scheduler(self) -> None:
        """Raise ``EnvironmentUnusableError`` if no scheduler is there. See ``NoSchedulerError``, too."""
        self._connection.check_listener()

    def status(self, *, fold: bool = False) -> SchedulerStatus:
        """Return the scheduler, its devices and all jobs.

        With ``fold``, the jobs of arrays are not in ``jobs``, but only counted in ``arrays``.
        """
        status = self._ask(verbs.Status(fold=fold), verbs.SchedulerStatus)
        jobs = list(status.jobs)
        while len(jobs) < status.job_count:
            jobs += self._ask(verbs.Status(after=len(jobs), fold=fold), verbs.SchedulerStatus).jobs
        return msgspec.structs.replace(status, jobs=tuple(jobs))

    def jobs(self) -> list[JobInfo]:
        """Return all jobs, in order of submission. ``why`` of each says why it does not train."""
        return list(self.status().jobs)

    def wait(self, job: str, timeout_s: float | None = None) -> JobInfo | None:
        """Wait until ``job`` has ended and return it. Return None after ``timeout_s``."""
        ended = self._await(verbs.Wait(job=job), verbs.Ended, timeout_s)
        return None if ended is None else ended.job

    def cancel(self, job: str) -> None:
        """End ``job``."""
        self._ask(verbs.Cancel(job=job), verbs.Done)

    def suspend(self, job: str) -> None:
        """Take ``job`` off its devices at its next boundary, until ``resume``."""
        self._ask(verbs.Suspend(job=job), verbs.Done)

    def resume(self, job: str) -> None:
        """Let a job have devices that ``suspend`` has stopped, or that was submitted with ``hold``."""
        self._ask(verbs.Resume(job=job), verbs.Done)

    def adjust(
        self,
        job: str,
        *,
        weight: float | None = None,
        priority: int | None = None,
        time_limit_s: float | None = None,
    ) -> None:
        """Change what was asked for ``job``, which has not ended. None: it stays."""
        change = verbs.Adjust(job=job, weight=weight, priority=priority, time_limit_s=time_limit_s)
        self._ask(change, verbs.Done)

    def set(self, *settings: str) -> dict[str, str]:
        """Change settings of the scheduler, all or none, and return all as they are then.

        Parameters
        ----------
        settings
            As after ``gpuslice set``: ``"policy=las"``, ``"quantum=30s"``. Nothing is changed without any.
        """
        return {one.name: one.value for one in self.settings(*settings)}

    def settings(self, *settings: str) -> tuple[SettingInfo, ...]:
        """Change settings as ``set`` does. Return all settings, and which ``set`` has ever changed."""
        return self._ask(verbs.Set(settings=settings), verbs.Settings).settings

    def requeue(self, job: str, *, fresh: bool = False) -> None:
        """Give ``job``, which has ended, another attempt: from its newest snapshot, or ``fresh``."""
        self._ask(verbs.Requeue(job=job, fresh=fresh), verbs.Done)

    def migrate(self, job: str, devices: Sequence[str]) -> Moving:
        """Suspend ``job`` and resume it on ``devices``, one for each rank. Return what is expected of that.

        A job that waits goes there when its turn comes. A job that has these devices goes where ``job`` comes
        from.
        """
        return self._ask(verbs.Migrate(job=job, devices=tuple(devices)), verbs.Moving)

    def weight(self, job: str, weight: float) -> None:
        """Give ``job`` another weight: its share under ``rr`` and ``gandiva``."""
        self._ask(verbs.Weight(job=job, weight=weight), verbs.Done)

    def pause(self, devices: Sequence[str], *, for_s: float | None = None) -> DevicesChanged:
        """Close ``devices`` to all jobs for ``for_s`` (None: until ``unpause``). What is there parks.

        A name of a node stands for all of its devices, here and in the next methods.
        """
        return self._ask(verbs.Pause(devices=tuple(devices), for_s=for_s), verbs.DevicesChanged)

    def unpause(self, devices: Sequence[str]) -> DevicesChanged:
        """Open paused ``devices`` again."""
        return self._ask(verbs.Unpause(devices=tuple(devices)), verbs.DevicesChanged)

    def drain(self, devices: Sequence[str] = ()) -> DevicesChanged:
        """Let no job begin on ``devices`` (none named: on all). Jobs that have begun there go on."""
        return self._ask(verbs.Drain(devices=tuple(devices)), verbs.DevicesChanged)

    def undrain(self, devices: Sequence[str] = ()) -> DevicesChanged:
        """Let jobs begin again on ``devices`` (none named: on all that are drained)."""
        return self._ask(verbs.Undrain(devices=tuple(devices)), verbs.DevicesChanged)

    def reserve(
        self, devices: Sequence[str], *, end_in_s: float, begin_in_s: float = 0.0, user: str = ""
    ) -> DevicesChanged:
        """Let only jobs of ``user`` have ``devices``, in a time that begins and ends in so many seconds.

        ``user`` is a tenant; empty: the jobs without one. ``unreserve`` takes the ``id`` in the answer.
        """
        request = verbs.Reserve(devices=tuple(devices), begin_in_s=begin_in_s, end_in_s=end_in_s, user=user)
        return self._ask(request, verbs.DevicesChanged)

    def unreserve(self, reservation: str) -> DevicesChanged:
        """End a reservation, or do not begin it."""
        return self._ask(verbs.Unreserve(reservation=reservation), verbs.DevicesChanged)

    def logs(self, job: str) -> LogFiles:
        """Return the paths of the output of ``job``, on the scheduler's machine."""
        return self._ask(verbs.Logs(job=job), verbs.LogFiles)

    def read_log(self, job: str, offset: int = 0, *, err: bool = False) -> bytes:
        """Return the next part of what ``job`` has printed, or written to stderr, from byte ``offset`` on."""
        return self._ask(verbs.ReadLog(job=job, err=err, offset=offset), verbs.LogPart).data

    def events(self, after: int = 0) -> Iterator[EventInfo]:
        """Yield what happened after event number ``after`` until now, the oldest event first."""
        while True:
            part = self._ask(verbs.Events(after=after), verbs.History)
            yield from part.events
            if part.after == after:
                return
            after = part.after

    def down(self, *, drain: bool = False, keep: bool = False) -> None:
        """Cancel all jobs and end the scheduler. Return when all their processes have ended.

        By TCP, return when the scheduler says that it leaves.

        Parameters
        ----------
        drain
            Let the jobs finish first.
        keep
            Park all jobs and move their snapshots to a disk. The next scheduler goes on with them, also after
            a reboot. ``call_off`` ends that.

        Raises
        ------
        UsageError
            If some jobs cannot be kept, or for both ``drain`` and ``keep``; all jobs go on.
        RamDiskFullError
            If the disk has no room for what is to be kept; all jobs go on.
        """
        if drain and keep:
            raise UsageError("--drain and --keep exclude each other", "name one of them")
        with self._connection.awaiting_exit():
            self._ask(verbs.Down(drain=drain, keep=keep), verbs.Done)

    def call_off(self) -> None:
        """Let all jobs go on that are being kept (``down(keep=True)``), and the scheduler stay."""
        self._ask(verbs.CallOff(), verbs.Done)

    def _ask(self, request: Request, kind: type[_A]) -> _A:
        answer = self._await(request, kind, None)
        assert answer is not None
        return answer

    def _await(self, request: Request, kind: type[_A], timeout_s: float | None) -> _A | None:
        """Send ``request`` and return the answer. Return None after ``timeout_s``.

        ``Wait`` and ``Admission`` are sent again: a new scheduler may have taken over meanwhile.
        """
        self._connection.check_listener()
        frames = verbs.encode(checked(request))
        if len(frames[1]) > MAX_MESSAGE_BYTES:
            raise UsageError(
                f"the request has {len(frames[1])} bytes of {MAX_MESSAGE_BYTES}",
                "pass long arguments or variables in a file",
            )
        ends_s = None if timeout_s is None else self._clock.now() + timeout_s
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            try:
                self._connection.connect_to(dealer)
                dealer.send_multipart(frames)
                while not self._connection.wait_answer(dealer, self._pause_ms(ends_s)):
                    if ends_s is not None and self._clock.now() >= ends_s:
                        return None
                    self._connection.check_listener()
                    if isinstance(request, verbs.Wait | verbs.Admission):
                        dealer.send_multipart(frames)
                return _expect(verbs.decode_answer(dealer.recv_multipart()), kind)
            finally:
                self._connection.release(dealer)

    def _pause_ms(self, ends_s: float | None) -> int:
        if ends_s is None:
            return _LOOK_AGAIN_MS
        left_ms = max(0.0, ends_s - self._clock.now()) * 1000.0
        return int(min(_LOOK_AGAIN_MS, left_ms + 1))


def _message(words: Sequence[str], request: JobRequest, kind: type[_M]) -> _M:
    """Return the request to send to the scheduler, with the command that starts the job."""
    # Late: only this verb needs to know how jobs are started.
    from gpuslice.launch.command import command_line, environment
    from gpuslice.launch.command_stem import stem
    from gpuslice.launch.rank_start import as_ranks, is_told_ranks, with_ranks

    argv = command_line(words)
    most_devices = request.most_devices
    relaunch = most_devices > request.devices and is_told_ranks(words, most_devices)
    if relaunch:
        pass  # it is told in its environment, each time that it is started
    elif most_devices > 1:
        argv = command_line(as_ranks(words, most_devices))
    elif request.devices > 1:
        argv = command_line(with_ranks(words, request.devices))
    variables = {**(os.environ if request.environ is None else request.environ), **request.env}
    _check_utf8(argv, variables)
    settings = config.load(variables, route=request.route, checkpoint_every=request.checkpoint_every)
    started: dict[str, Any] = {
        "directory": os.path.normpath(os.path.join(working_directory(), request.directory)),
        "environ": environment(settings, variables),
        "env": {},
        "route": settings.route,
        "checkpoint_every": settings.checkpoint_every,
    }
    fields = msgspec.structs.asdict(request) | started
    return kind(stem=stem(words), argv=tuple(argv), relaunch=relaunch, **fields)


def _expect(answer: Answer, kind: type[_A]) -> _A:
    if isinstance(answer, verbs.Failed):
        raise _ERRORS.get(answer.exit_code, RemoteProtocolError)(answer.error, answer.remedy)
    if not isinstance(answer, kind):
        raise RemoteProtocolError(f"{type(answer).__name__} is no answer to this request")
    return answer


def _check_utf8(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise ``UsageError`` if a word or a variable is not UTF-8 text, naming it."""
    for word in argv:
        if not is_word(word):
            raise UsageError(
                f"{word!r} is not UTF-8 text without NUL", "rename the file, or leave the word out"
            )
    for name, value in environ.items():
        if not is_word(name):
            raise UsageError(f"the name of the variable {name!r} is not UTF-8 text", "unset it with `env -u`")
        if not is_word(value):
            remedy = f"unset it, or set another value: --env {name}=VALUE"
            raise UsageError(f"the variable {name} is {value!r}, which is not UTF-8 text", remedy)
