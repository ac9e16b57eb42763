"""Ends jobs for gpuslice, and holds back the script's signals while the job's state is on the move."""

from __future__ import annotations

import _thread
import atexit
import ctypes
import gc
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, cast

from gpuslice.errors import WITHOUT_STATE, GpusliceError, SwitchFailedError, hide_own_frames

#: The signals that ask a script to end: Ctrl-C, `kill`, a terminal that closes.
ENDING_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})


def say(*lines: str) -> None:
    """Print lines of gpuslice's own on stderr. A closed or broken stderr is ignored: the training goes on."""
    if sys.stderr is None:
        return
    with suppress(OSError, ValueError):  # the reader has gone, the disk is full, the script has closed it
        sys.stderr.write("".join(f"gpuslice: {line}\n" for line in lines if line))
        sys.stderr.flush()


def end(error: GpusliceError) -> NoReturn:
    """Print the error and raise ``SystemExit``, so that ``finally`` blocks and exit handlers run.

    Only for a job whose state is whole.
    """
    say(error.message, error.remedy)
    sys.exit(error.exit_code)


_NOT_ENDED = object()
_exit_status: object = _NOT_ENDED
_interrupted = False


class _ExitCode:
    """A stand-in for ``SystemExit.code`` that notes the exit status when Python itself reads it."""

    def __init__(self, member: Any) -> None:
        self._member = member

    def __get__(self, error: SystemExit | None, owner: type | None = None) -> Any:
        if error is None:
            return self
        code = self._member.__get__(error, owner)
        if sys._getframe().f_back is None:  # no Python code asks
            global _exit_status
            _exit_status = code
        return code

    def __set__(self, error: SystemExit, code: Any) -> None:
        self._member.__set__(error, code)


def watch_exit() -> None:
    """Note from now on with what exit status the script ends. Python itself does not keep the status."""
    if multiprocessing.process.parent_process() is not None:
        _watch_interrupts()
    member = SystemExit.__dict__["code"]
    if isinstance(member, _ExitCode):
        return  # a fork of a process that watches its own exit
    # A built-in class takes no new attributes; what stands behind its read-only dictionary does.
    gc.get_referents(SystemExit.__dict__)[0]["code"] = _ExitCode(member)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))

    def exit(status: Any = None, /) -> NoReturn:
        # Python 3.11's own makes a SystemExit of the status only if somebody catches it.
        try:
            raise SystemExit(*status) if isinstance(status, tuple) else SystemExit(status)
        except SystemExit as ending:
            hide_own_frames(ending)
            raise

    exit.__doc__ = sys.exit.__doc__
    sys.exit = exit


def _watch_interrupts() -> None:
    """Note from now on if this process is interrupted. A process of torch's ``spawn`` then exits with 0.

    The kernel interrupts such processes when the process that started them dies.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _interrupted
        _interrupted = True
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(
            ValueError
        ):  # only the main thread may; a process whose main thread does not train is left
            signal.signal(signal.SIGINT, interrupt)


def at_end(function: Callable[..., None], *arguments: object) -> None:
    """Have ``function`` called when the script has ended. The function that is registered last runs first.

    In a process of multiprocessing's it is a finalizer: such a process runs no exit handlers.
    """
    if multiprocessing.process.parent_process() is None:
        atexit.register(function, *arguments)
    else:
        multiprocessing.util.Finalize(None, function, arguments, exitpriority=0)


def ended_well() -> bool:
    """Return True at exit if no exception, interrupt or exit status other than 0 has ended the script."""
    error = sys.exc_info()[1]  # a process of multiprocessing's runs finalizers while its error propagates
    if error is not None:
        return isinstance(error, SystemExit) and error.code in (None, 0)
    # Python keeps the exception that it printed a traceback of.
    return not _interrupted and not hasattr(sys, "last_value") and _exit_status in (_NOT_ENDED, None, 0)


def end_parked(error: GpusliceError) -> NoReturn:
    """Print the error and end the process at once, because its job's state is away.

    The script's own code must not run: it would touch empty tensors. No exception leaves this function, even
    if stderr is broken: it would unwind the script.
    """
    try:
        say(f"{WITHOUT_STATE}: {error.message}", error.remedy)
        _flush()
    finally:
        os._exit(error.exit_code)


@contextmanager
def whole_or_ended(whole: Callable[[], bool]) -> Iterator[None]:
    """Run the block. If it raises while the job's state is away, end the process instead.

    `end_parked` ends it. Put this directly around what may fail: no `finally` and no signal handler of the
    script may come between.

    Parameters
    ----------
    whole
        Returns True if the state is there.
    """
    try:
        yield
    except BaseException as error:  # the script must not see an exception of any kind
        if not whole():
            end_parked(as_ours(error, "bringing the job's state back"))
        raise


@contextmanager
def ours(step: str) -> Iterator[None]:
    """Turn errors of CUDA, torch and the system inside the block into gpuslice's own, which name ``step``."""
    try:
        yield
    except Exception as error:
        if isinstance(error, GpusliceError):
            raise
        raise as_ours(error, step) from error


def as_ours(error: BaseException, step: str) -> GpusliceError:
    """Return ``error`` if it is gpuslice's own; else a `SwitchFailedError` that says how ``step`` failed."""
    if isinstance(error, GpusliceError):
        return error
    text = f"{type(error).__name__}: {error}".rstrip(": ").replace("\n", " ")
    return SwitchFailedError(f"{step} failed: {text}")


def leave_parked() -> NoReturn:
    """End the process at once with exit status 0. Its state is away and not needed any more.

    The script's own code must not run.
    """
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()


@contextmanager
def undisturbed(
    notice: Callable[[int], None] | None = None, *, late: list[int] | None = None
) -> Iterator[None]:
    """Hold back the script's signal handlers (Ctrl-C among them) until the block has ended.

    A handler may raise an exception or look at tensors. Neither may happen while some tensors are empty.
    Signals without a Python handler act as usual. For the main thread.

    Parameters
    ----------
    notice
        Called with every signal that is held back, at the moment when its handler would have run.
    late
        A list that receives the signals that arrived, for the caller to `deliver`. Without the list, or if
        the block raises an exception, their handlers run as the block ends.
    """
    waiting: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        waiting.append(signum)
        if notice is not None:
            notice(signum)

    handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    held = {signum: handler for signum, handler in handlers.items() if callable(handler)}
    try:
        for signum in held:
            signal.signal(signum, note)
        yield
        if late is not None:
            late += waiting
            waiting.clear()
    finally:
        try:
            _restore([*held.items()])
        finally:
            _deliver_here(waiting)


def _restore(handlers: list[tuple[int, Any]]) -> None:
    """Put all handlers back in place, even if one of them already runs, and raises, meanwhile."""
    while handlers:
        try:
            signal.signal(*handlers[-1])
            handlers.pop()
        finally:
            _restore(handlers)


def _deliver_here(signals: list[int]) -> None:
    """Run the handlers of ``signals`` in order. If one raises, the others run all the same."""
    while signals:
        number = signals.pop(0)
        try:
            signal.raise_signal(number)
        finally:
            _deliver_here(signals)


#: Marks a signal as arrived, like the system's own handler.
_falls_due = cast(Callable[[int], None], _thread.interrupt_main)


def deliver(signals: Sequence[int]) -> None:
    """Have the script's handlers run for signals that were held back. A function must call this last.

    The signals only become due here. Python runs a handler when it next looks for signals: after a call of a
    C function, in a loop and when a function begins, but not while calls return. So the handler runs in the
    script's own code, and a traceback through it shows no frame of ours. For the main thread.
    """
    # One instruction goes through the map, and Python does not look in the midst of it.
    _ = [*map(_falls_due, signals)]
