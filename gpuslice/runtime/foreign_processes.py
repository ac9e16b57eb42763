"""Refuses a suspend while a process of the job holds memory of a GPU and is none of the job's ranks.

No controller parks such a process (a spawned one that evaluates, say), so it keeps its memory while the ranks
park. It announces itself by a file in the RAM disk's directory as soon as torch initializes CUDA in it.
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
    """Have this process, and each fork, announce itself when it initializes CUDA, unless it is a rank."""
    torch.cuda._lazy_call(_announce)  # type: ignore[no-untyped-call]


def become_rank() -> None:
    """Note that this process is a rank, which parks when asked to, and remove its announcement."""
    global _ranks_pid
    _ranks_pid = os.getpid()
    with suppress(OSError):
        _own_file(_directory()).unlink()


def leave_rank() -> None:
    """Note that another process is the rank now, and announce this one if it uses CUDA.

    This process keeps its memory of a GPU when the new rank parks.
    """
    global _ranks_pid
    _ranks_pid = 0
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _announce()


def refuse(directory: Path) -> None:
    """Check that no process of the job except its ranks holds memory of a GPU.

    Parameters
    ----------
    directory
        The RAM disk's directory.

    Raises
    ------
    SuspendRefusedError
        If a process does. The error names the process.
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
    # An error here must not keep the script from its GPU.
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
