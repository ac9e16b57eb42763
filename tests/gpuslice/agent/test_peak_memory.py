"""The most memory that a job has used: measured after its first steps, without what moving it takes."""

from __future__ import annotations

import mmap

import pytest

from gpuslice.agent.peak_memory import PeakMemory
from gpuslice.types import DeviceName

CPU = DeviceName("cpu", 0)
NBYTES = 64 << 20


def touch(nbytes: int) -> mmap.mmap:
    """Private memory of this process, every page of it resident."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, nbytes, mmap.PAGESIZE):
        memory[page] = 1
    return memory


def test_the_peak_is_known_after_the_first_steps_and_stays() -> None:
    memory = PeakMemory()
    memory.begin()
    assert memory.look(CPU, 2) == memory.most_bytes == 0
    before = memory.look(CPU, 3)
    assert before > 0
    touch(NBYTES).close()
    assert memory.look(CPU, 4) == pytest.approx(before + NBYTES, abs=NBYTES // 4), (
        "it is gone, but it was there"
    )
    assert memory.most_bytes >= before + 3 * NBYTES // 4


def test_what_moving_the_state_takes_does_not_count() -> None:
    memory = PeakMemory()
    memory.begin()
    before = memory.look(CPU, 3)
    touch(NBYTES).close()
    memory.begin()
    assert memory.look(CPU, 4) < before + NBYTES // 2
