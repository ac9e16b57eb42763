"""What a full RAM disk says: one unit, and a remedy that helps."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuslice.checkpoint import files
from gpuslice.checkpoint.ramdisk import budget
from gpuslice.checkpoint.ramdisk.budget import Budget

_MIB = 1 << 20


@pytest.mark.parametrize(
    ("limit", "total", "free", "memory", "in_shm", "remedies"),
    [
        (32, 4096, 4000, 4000, True, ["raise --ramdisk-limit (GPUSLICE_RAMDISK_LIMIT"]),
        (None, 4096, 4000, 4000, True, ["raise --ramdisk-limit"]),
        (None, 64, 60, 4000, True, ["--shm-size", "GPUSLICE_RAMDISK_DIR", "--ramdisk-dir", "loader workers"]),
        (1000, 64, 60, 4000, True, ["--shm-size", "ramdisk gc"]),
        (1000, 64, 60, 4000, False, ["make room there", "GPUSLICE_RAMDISK_DIR"]),
        (None, 4096, 4000, 10, True, ["free some memory", "GPUSLICE_RAMDISK_DIR"]),
    ],
)
def test_the_remedy_is_for_what_has_no_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
    total: int,
    free: int,
    memory: int,
    in_shm: bool,
    remedies: list[str],
) -> None:
    status = SimpleNamespace(f_frsize=_MIB, f_blocks=total, f_bavail=free)
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    monkeypatch.setattr(budget, "available_bytes", lambda: memory * _MIB)
    monkeypatch.setattr(files, "is_in_shared_memory", lambda path: in_shm)
    error = Budget(tmp_path, None if limit is None else limit * _MIB).full(100 * _MIB)
    assert all(remedy in error.remedy for remedy in remedies)
    assert "100.00 MiB more would be needed, 0 B of" in error.message
    assert " MB" not in error.message + error.remedy
