"""Processes of a job that hold memory of a GPU and are no ranks of it: they make a suspend refused, by name.

Such a process (a spawned one that evaluates, say) has boundaries of nobody, so it keeps its memory while the
ranks park. It announces itself by a file in the RAM disk's directory as soon as torch initializes CUDA in it.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import torch

from gpuslice.clock import process_began
from gpuslice.errors import GpusliceError, SuspendRefusedError
from gpuslice.runtime.ending import say
from gpuslice.types import shortened

_FILE = re.compile(r"holder\.(?P<launch>\d+)\.(?P<pid>\d+)\.(?P<began>\d+)")
_LAUNCH = "GPUSLICE_LAUNCH"
_WHAT_CHARACTERS = 100
_ranks_pid = 0


def announce_on_cuda() -> None:
    """Have this process, and what it forks, announce itself when it initializes CUDA, unless it is a rank."""
    torch.cuda._lazy_call(_announce)  # type: ignore[no-untyped-call]


def become_rank() -> None:
    """This process parks when it is asked to: it is not to be announced, or not any more."""
    global _ranks_pid
    _ranks_pid = os.getpid()
    with suppress(OSError):
        _own_file(_directory()).unlink()


def leave_rank() -> None:
    """Another process is the rank now: what this one holds of a GPU stays when that one parks."""
    global _ranks_pid
    _ranks_pid = 0
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _announce()


def refuse(directory: Path) -> None:
    """Check that none of the job's processes holds memory of a GPU but its ranks.

    Parameters
    ----------
    directory
        The RAM disk's.

    Raises
    ------
    SuspendRefusedError
        Naming one that does.
    """
    with os.scandir(directory) as entries:
        found = [(entry, match) for entry in entries if (match := _FILE.fullmatch(entry.name)) is not None]
    for entry, match in found:
        if process_began(int(match["pid"])) != match["began"]:
            with suppress(FileNotFoundError):
                os.unlink(entry.path)
        elif match["launch"] == os.environ.get(_LAUNCH):
            try:
                what = Path(entry.path).read_text(encoding="utf-8", errors="replace")
            except FileNotFoundError:
                continue  # it has become a rank meanwhile
            raise SuspendRefusedError(
                f"process {match['pid']} ({what}) holds memory of a GPU and is none of the job's ranks",
                "let it end first, keep it off the GPU, or have it join the process group",
            )


def _announce() -> None:
    if _ranks_pid == os.getpid() or _LAUNCH not in os.environ:
        return
    # Whatever is wrong here, it is no reason to keep a script from its GPU.
    try:
        file = _own_file(_directory())
        file.write_text(shortened(" ".join(sys.orig_argv), _WHAT_CHARACTERS), encoding="utf-8")
    except (OSError, GpusliceError) as error:
        say(f"this process cannot announce that it holds memory of a GPU: {error}")


def _directory() -> Path:
    from gpuslice.config import load  # late: few processes come this far

    return load().ramdisk_directory


def _own_file(directory: Path) -> Path:
    pid = os.getpid()
    return directory / f"holder.{os.environ.get(_LAUNCH, '0')}.{pid}.{process_began(pid)}"
