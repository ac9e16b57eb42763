"""How a job ends when gpuslice ends it, and how signals wait while its state is on the move."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from gpuslice.errors import GpusliceError


def say(*lines: str) -> None:
    """Lines of gpuslice's own on stderr."""
    sys.stderr.write("".join(f"gpuslice: {line}\n" for line in lines if line))
    sys.stderr.flush()


def end(error: GpusliceError) -> NoReturn:
    """End a job whose state is whole: by ``SystemExit``, so its ``finally`` blocks and exit handlers run."""
    say(error.message, error.remedy)
    sys.exit(error.exit_code)


_exit_status: object = None


def watch_exit() -> None:
    """Note from now on with what the script calls ``sys.exit``; Python itself does not keep it."""
    plain_exit = sys.exit
    if plain_exit.__module__ == __name__:
        return

    def exit(status: Any = None, /) -> NoReturn:
        global _exit_status
        _exit_status = status
        plain_exit(status)

    sys.exit = exit


def ended_well() -> bool:
    """At exit: whether neither an exception nor ``sys.exit`` with an error ended the script."""
    # Python keeps the exception that it printed a traceback of.
    return not hasattr(sys, "last_value") and _exit_status in (None, 0)


def end_parked(error: GpusliceError) -> NoReturn:
    """End a job whose state is away, at once: its own code must not run, it would touch empty tensors."""
    say(error.message, error.remedy)
    _flush()
    os._exit(error.exit_code)


def die_parked(signum: signal.Signals) -> NoReturn:
    """End a job whose state is away by a signal, past the script's own handler for it."""
    _flush()
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    # Only a blocked signal comes this far.
    os._exit(128 + signum)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back the script's signal handlers (Ctrl-C among them) until the block has ended.

    A handler may raise or look at tensors; neither may happen while some of them are empty. Signals
    without a Python handler act as ever. For the main thread.
    """
    waiting: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        waiting.append(signum)

    handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    held = {signum: handler for signum, handler in handlers.items() if callable(handler)}
    for signum in held:
        signal.signal(signum, note)
    try:
        yield
    finally:
        for signum, handler in held.items():
            signal.signal(signum, handler)
        for number in waiting:
            signal.raise_signal(number)
