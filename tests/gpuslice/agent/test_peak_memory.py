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
    memory.begin(CPU)
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
    memory.begin(CPU)
    before = memory.look(CPU, 3)
    touch(NBYTES).close()
    memory.begin(CPU)
    assert memory.look(CPU, 4) < before + NBYTES // 2


def test_what_moving_the_state_takes_on_a_gpu_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's peak counts on, as the script may look at it."""
    gpu, has = DeviceName("cuda", 1), {"peak": 10, "now": 8}
    monkeypatch.setattr("gpuslice.kernels.cuda.runtime_calls.has_begun", lambda: True)
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda index: has["peak"])
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda index: has["now"])
    memory = PeakMemory()
    assert memory.look(gpu, 3) == 10
    has.update(peak=50)
    memory.begin(gpu)
    assert memory.look(gpu, 4) == 10
    has.update(now=12)
    assert memory.look(gpu, 5) == 12
    has.update(peak=60)
    assert memory.look(gpu, 6) == 60
