"""What ``job.suspend`` tells a script of the snapshot that it took."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a suspend put into the RAM disk.

    Attributes
    ----------
    path
        The file; ``gpuslice.restore`` reads it. Later suspends reuse it, and without a job name it ends
        with the process: copy it to keep it.
    nbytes
        Bytes in the snapshot.
    seconds
        How long the suspend took.
    gb_per_s
        Rate of the copy out of the device, 1e9 bytes per second.
    boundary
        Mini-batch boundaries passed.
    restartable
        Whether another process can go on from it.
    """

    path: Path
    nbytes: int
    seconds: float
    gb_per_s: float
    boundary: int
    restartable: bool
