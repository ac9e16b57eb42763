"""Has a rank's checkpoints wait before they are published, while a file names the rank."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

from gpuslice.checkpoint.ramdisk.writer import SnapshotWriter


def arm(file: Path, rank: int) -> None:
    """See to it that this process, which is that rank, does so."""
    publish = SnapshotWriter.publish

    @functools.wraps(publish)
    def held(*args: Any, **kwargs: Any) -> Any:
        while file.exists() and file.read_text() == str(rank):
            time.sleep(0.01)
        return publish(*args, **kwargs)

    SnapshotWriter.publish = held  # type: ignore[method-assign]
