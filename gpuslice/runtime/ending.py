"""How a job ends when gpuslice ends it, and how signals wait while its state is on the move."""

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

#: What asks a script to end, if it lets it: Ctrl-C, `kill`, a terminal that closes.
ENDING_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})


def say(*lines: str) -> None:
    """Print lines of gpuslice's own on stderr. A stderr that is closed or broken must not end a training."""
    if sys.stderr is None:
        return
    with suppress(OSError, ValueError):  # the reader has gone, the disk is full, the script has closed it
        sys.stderr.write("".join(f"gpuslice: {line}\n" for line in lines if line))
        sys.stderr.flush()


def end(error: GpusliceError) -> NoReturn:
    """End a job whose state is whole: by ``SystemExit``, so its ``finally`` blocks and exit handlers run."""
    say(error.message, error.remedy)
    sys.exit(error.exit_code)


_NOT_ENDED = object()
_exit_status: object = _NOT_ENDED
_interrupted = False


class _ExitCode:
    """Stands in for ``SystemExit.code``, which Python itself reads when one has ended the script."""

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
    """Note from now on with what exit status the script ends; Python itself does not keep it."""
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
    """Note when this process is interrupted: one of torch's ``spawn`` exits with 0 all the same.

    The kernel interrupts its processes when the one that started them dies.
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
    """Have ``function`` called when the script has ended; those that come later are called earlier.

    A fork of multiprocessing's runs its finalizers, but no exit handlers.
    """
    if multiprocessing.process.parent_process() is None:
        atexit.register(function, *arguments)
    else:
        multiprocessing.util.Finalize(None, function, arguments, exitpriority=0)


def ended_well() -> bool:
    """Return True at exit if no exception, interrupt or exit status other than 0 has ended the script."""
    error = sys.exc_info()[1]  # a process of multiprocessing's finalizes while its error is on the way
    if error is not None:
        return isinstance(error, SystemExit) and error.code in (None, 0)
    # Python keeps the exception that it printed a traceback of.
    return not _interrupted and not hasattr(sys, "last_value") and _exit_status in (_NOT_ENDED, None, 0)


def end_parked(error: GpusliceError) -> NoReturn:
    """End a job whose state is away, at once: its own code must not run, it would touch empty tensors.

    No exception gets out of here, whatever has become of stderr: it would unwind the script.
    """
    try:
        say(f"{WITHOUT_STATE}: {error.message}", error.remedy)
        _flush()
    finally:
        os._exit(error.exit_code)


@contextmanager
def whole_or_ended(whole: Callable[[], bool]) -> Iterator[None]:
    """Let an error out only while the job's state is there; otherwise the process ends (`end_parked`).

    Directly around what may fail: neither a `finally` nor a signal's handler of the script may come between.

    Parameters
    ----------
    whole
        Whether the state is there.
    """
    try:
        yield
    except BaseException as error:  # whatever it is, the script must not see it
        if not whole():
            end_parked(as_ours(error, "bringing the job's state back"))
        raise


@contextmanager
def ours(step: str) -> Iterator[None]:
    """Errors of CUDA, torch and the system in one of our steps are ours: they tell nothing of the script."""
    try:
        yield
    except Exception as error:
        if isinstance(error, GpusliceError):
            raise
        raise as_ours(error, step) from error


def as_ours(error: BaseException, step: str) -> GpusliceError:
    """An error, or one of ours that says what went wrong in which step."""
    if isinstance(error, GpusliceError):
        return error
    text = f"{type(error).__name__}: {error}".rstrip(": ").replace("\n", " ")
    return SwitchFailedError(f"{step} failed: {text}")


def leave_parked() -> NoReturn:
    """End a process well whose state is away and is not needed any more: its own code must not run."""
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

    A handler may raise or look at tensors; neither may happen while some of them are empty. Signals
    without a Python handler act as ever. For the main thread.

    Parameters
    ----------
    notice
        Told of every signal that is held back, at the moment when its handler would have run.
    late
        Gets the signals that arrived, for the caller to `deliver`, if the block ends without an exception;
        otherwise their handlers run as the block ends.
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
    """Put all handlers in place, though one that is may run, and raise, before the next."""
    while handlers:
        try:
            signal.signal(*handlers[-1])
            handlers.pop()
        finally:
            _restore(handlers)


def _deliver_here(signals: list[int]) -> None:
    """Let the handlers have their signals, in order; one that raises does not keep them from the others."""
    while signals:
        number = signals.pop(0)
        try:
            signal.raise_signal(number)
        finally:
            _deliver_here(signals)


#: Marks a signal as arrived, like the system's own handler.
_falls_due = cast(Callable[[int], None], _thread.interrupt_main)


def deliver(signals: Sequence[int]) -> None:
    """Let the script's handlers have the signals that were held back; the last thing that a function does.

    They only become due here. Python runs a handler when it next looks for one, which is after a call of a
    C function, in a loop and when a function begins, but not while calls return: so it is run in
    the script's own code, and a traceback through it shows no frame of ours. For the main thread.
    """
    # One instruction goes through the map, and Python does not look in the midst of it.
    _ = [*map(_falls_due, signals)]
