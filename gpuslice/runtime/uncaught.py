"""Prints an error of gpuslice that a script under ``gpuslice run`` does not catch, as a command line would.

It prints one or two lines, which name the script's line, and exits with the error's exit code. All other
exceptions have Python's own traceback. Only the launcher's processes do this: ``python train.py`` gets a
traceback like that of any library.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType

from gpuslice.errors import GpusliceError, hide_all_own_frames
from gpuslice.runtime.ending import end


def install(explain: Callable[[BaseException], str] = lambda error: "") -> None:
    """Install an exception hook that prints an uncaught gpuslice error, and exits with its exit code.

    A script's own ``sys.excepthook`` stays in place. If it calls ``sys.__excepthook__``, that is ours.

    Parameters
    ----------
    explain
        Returns a note to add to another error's traceback; an empty string for most errors.
    """
    original = sys.__excepthook__

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None, /) -> None:
        if not isinstance(error, GpusliceError):
            hide_all_own_frames(error)
            if note := explain(error):
                error.add_note(note)
            original(kind, error, error.__traceback__)
            return
        error.message += _location(trace)
        end(error)  # Python takes a SystemExit of this hook for the script's

    excepthook.__doc__ = original.__doc__
    if sys.excepthook is original:
        sys.excepthook = excepthook
    sys.__excepthook__ = excepthook


def _location(trace: TracebackType | None) -> str:
    """Return the script's line that called gpuslice, as text for a message; empty if there is none."""
    location = ""
    for frame, line in traceback.walk_tb(trace):
        if _is_ours(frame):
            break
        location = f" ({frame.f_code.co_filename}, line {line})"
    return location


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).split(".")[0] == "gpuslice"
