"""The description of a snapshot that ``job.suspend`` returns to a script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that a suspend wrote to the RAM disk.

    Attributes
    ----------
    path
        The file, for ``gpuslice.restore``. Later suspends overwrite it. Without a job name it is removed when
        the process ends. Copy it to keep it.
    nbytes
        Size of the snapshot in bytes.
    seconds
        Duration of the suspend.
    gb_per_s
        Rate of the copy from the device, in 1e9 bytes per second.
    boundary
        Number of mini-batch boundaries passed.
    restartable
        True if another process can go on from the snapshot.
    """

    path: Path
    nbytes: int
    seconds: float
    gb_per_s: float
    boundary: int
    restartable: bool
