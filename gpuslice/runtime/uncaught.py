"""What a script under ``gpuslice run`` shows when it does not catch an error of ours.

As from the command line: one or two lines, which name the script's line, and the error's exit code. All
other exceptions have Python's own traceback. Only the launcher's processes do this; who runs ``python
train.py`` gets a traceback like that of any library.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType

from gpuslice.errors import GpusliceError, hide_all_own_frames
from gpuslice.runtime.ending import end


def install(explain: Callable[[BaseException], str] = lambda error: "") -> None:
    """End the script like a command line if an error of ours ends it.

    A script's own ``sys.excepthook`` stays in place; if it calls ``sys.__excepthook__``, that is ours.

    Parameters
    ----------
    explain
        What to add to another error's traceback; nothing for most.
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
    """The line from which the script called us."""
    location = ""
    for frame, line in traceback.walk_tb(trace):
        if _is_ours(frame):
            break
        location = f" ({frame.f_code.co_filename}, line {line})"
    return location


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).split(".")[0] == "gpuslice"
