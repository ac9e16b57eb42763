"""Fixtures of the tests of what leaves the RAM disk: a small one that spills, and a store of a job in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore

from ...conftest import MIB


@pytest.fixture
def disk(shm: Path, place: Path) -> RamDisk:
    return RamDisk(shm / "disk", 64 * MIB, spill_directory=place)


@pytest.fixture
def store(disk: RamDisk) -> Iterator[JobStore]:
    with disk.open_store("a") as opened:
        yield opened
