"""Kills a rank at the worst moments of a suspend, a resume and a restart: once, when a file says so.

``DIRECTORY/deadly`` names a moment and a rank, as ``emptied 2``. Whoever comes there removes it, and dies.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuslice.checkpoint.ramdisk.writer import SnapshotWriter
from gpuslice.checkpoint.switch import switch
from gpuslice.checkpoint.switch.capture_plan import CapturePlan
from gpuslice.runtime import job, trainings

#: Where each is: what is called there, and whether the rank dies before that or after it.
_MOMENTS: dict[str, tuple[Any, str, bool]] = {
    "planned": (CapturePlan, "copy_out", True),
    "copied": (CapturePlan, "copy_out", False),
    "published": (SnapshotWriter, "publish", False),
    "emptied": (switch, "empty", False),
    "resuming": (switch, "bring_back", True),
    "back": (switch, "bring_back", False),
    "agreed": (trainings, "agree", False),
    "checked": (job, "check", False),
}
SUSPENDING = ("planned", "copied", "published", "emptied")
RESUMING = ("resuming", "back")
RESTARTING = ("agreed", "checked")


def order(directory: Path, moment: str, rank: int) -> None:
    """Have a rank die at a moment, the next time that it comes there."""
    (directory / "new").write_text(f"{moment} {rank}")
    (directory / "new").rename(directory / "deadly")


def arm(directory: Path, rank: int) -> None:
    """See to it that this process, which is that rank, does as ordered."""
    for moment, (where, name, before) in _MOMENTS.items():
        die = functools.partial(_die, directory / "deadly", f"{moment} {rank}")
        setattr(where, name, _deadly(getattr(where, name), die, before=before))


def _deadly(call: Callable[..., Any], die: Callable[[], None], *, before: bool) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        if before:
            die()
        result = call(*args, **kwargs)
        if not before:
            die()
        return result

    return called


def _die(file: Path, told: str) -> None:
    if file.exists() and file.read_text() == told:
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
