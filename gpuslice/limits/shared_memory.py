"""Explain torch's errors about a full /dev/shm, where the RAM disk may be, too."""

from __future__ import annotations

import re
from pathlib import Path

from gpuslice.checkpoint.files import is_in_shared_memory, more_room, shared_memory_bytes
from gpuslice.config import format_size

_FULL = re.compile(
    r"insufficient shared memory|out of shared memory|shared memory limit"
    r"|</torch_\w+>.*(?:No space left|annot allocate)"
)


def explain(error: BaseException, ramdisk: Path) -> str:
    """Return what to add to an error of loader workers that found no room beside the RAM disk, or nothing."""
    if not _FULL.search(str(error)) or not is_in_shared_memory(ramdisk):
        return ""
    whole = format_size(shared_memory_bytes())
    return (
        f"gpuslice: the RAM disk {ramdisk} and the batches of loader workers share {whole}: "
        f"{more_room(ramdisk)}"
    )
