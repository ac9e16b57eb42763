"""Which memory nobody has written to, against every way to write that there is."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpuslice.kernels import writes
from gpuslice.kernels.host import HUGE_PAGE_BYTES, PAGE_BYTES, drop_pages, populate, view_address
from gpuslice.kernels.writes import WriteWatch

BLOCK = HUGE_PAGE_BYTES
_MADV_HUGEPAGE = 14


class Memory:
    """Private memory of so many huge pages at an address that is a multiple of one, all ones."""

    def __init__(self, blocks: int) -> None:
        room = mmap.mmap(-1, (blocks + 1) * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        skipped = -view_address(memoryview(room)) % BLOCK
        self.view = memoryview(room)[skipped : skipped + blocks * BLOCK]
        self.address = view_address(self.view)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(self.address), len(self.view), _MADV_HUGEPAGE)
        self.bytes = np.frombuffer(self.view, np.uint8)
        self.bytes[:] = 1

    def blocks(self) -> tuple[np.ndarray, np.ndarray]:
        addresses = self.address + np.arange(len(self.view) // BLOCK) * BLOCK
        return addresses, np.full(len(addresses), BLOCK)


@pytest.fixture
def memory() -> Memory:
    if writes._userfaultfd() is None:
        pytest.skip("this kernel does not say what was written")
    found = Memory(8)
    watch = WriteWatch()
    watch.watch(*found.blocks())
    assert watch.unwritten(*found.blocks()).all()
    watch.forget()
    return found


def _by_system_call(memory: Memory, at: int) -> None:
    with open("/dev/zero", "rb", buffering=0) as zeros:
        assert zeros.readinto(memory.view[at : at + 10]) == 10


def _by_dropping(memory: Memory, at: int) -> None:
    first = at // PAGE_BYTES * PAGE_BYTES
    drop_pages(memory.address + first, PAGE_BYTES)


def _by_dropping_and_reading(memory: Memory, at: int) -> None:
    _by_dropping(memory, at)
    assert memory.view[at] == 0


def _by_another_process(memory: Memory, at: int) -> None:
    with open(f"/proc/{os.getpid()}/mem", "r+b", buffering=0) as all_of_it:
        all_of_it.seek(memory.address + at)
        all_of_it.write(b"\2")


def _by_a_new_mapping(memory: Memory, at: int) -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    )
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
    page = memory.address + at // PAGE_BYTES * PAGE_BYTES
    assert libc.mmap(page, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == page


WAYS: dict[str, Callable[[Memory, int], object]] = {
    "numpy": lambda memory, at: memory.bytes.__setitem__(at, 2),
    "the same bytes": lambda memory, at: memory.bytes.__setitem__(at, 1),
    "C": lambda memory, at: ctypes.memset(memory.address + at, 2, 1),
    "a system call": _by_system_call,
    "another process": _by_another_process,
    "dropping": _by_dropping,
    "dropping and reading": _by_dropping_and_reading,
    "a new mapping": _by_a_new_mapping,
}


@pytest.mark.parametrize("at", [0, 3 * BLOCK + 12345, 8 * BLOCK - 11])
@pytest.mark.parametrize("way", WAYS)
def test_no_write_goes_unseen(memory: Memory, way: str, at: int) -> None:
    watch = WriteWatch()
    watch.watch(*memory.blocks())
    try:
        assert watch.unwritten(*memory.blocks()).tolist() == [True] * 8
        assert memory.bytes[5] == 1  # reading is not writing
        WAYS[way](memory, at)
        expected = [block != at // BLOCK for block in range(8)]
        assert watch.unwritten(*memory.blocks()).tolist() == expected
        for _ in range(2):
            assert watch.unwritten(*memory.blocks()).tolist() == expected
    finally:
        watch.forget()


def test_what_a_forked_child_writes_is_its_own(memory: Memory) -> None:
    watch = WriteWatch()
    watch.watch(*memory.blocks())
    child = os.fork()
    if child == 0:
        memory.bytes[BLOCK] = 9
        os._exit(int(memory.bytes[BLOCK]) - 9)
    assert os.waitpid(child, 0)[1] == 0
    memory.bytes[2 * BLOCK] = 9
    assert watch.unwritten(*memory.blocks()).tolist() == [block != 2 for block in range(8)]
    assert memory.bytes[BLOCK] == 1
    watch.forget()


def test_many_written_pages_are_all_seen(memory: Memory) -> None:
    watch = WriteWatch()
    watch.watch(*memory.blocks())
    memory.bytes[:: 2 * PAGE_BYTES] = 3  # more runs of pages than are asked for at once
    pages = memory.address + np.arange(len(memory.view) // PAGE_BYTES) * PAGE_BYTES
    found = watch.unwritten(pages, np.full(len(pages), PAGE_BYTES))
    assert found.tolist() == [bool(number % 2) for number in range(len(pages))]
    watch.forget()


def test_only_whole_huge_pages_are_watched(memory: Memory) -> None:
    watch = WriteWatch()
    start, half = memory.address + BLOCK // 2, BLOCK // 2
    # Neighbours with a header between them, to the middle of the last block; and one that is too small.
    address = np.array([start + 3 * BLOCK, start, memory.address + 7 * BLOCK])
    watch.watch(address, np.array([3 * BLOCK, 3 * BLOCK - 64, half]))
    found = watch.unwritten(*memory.blocks()).tolist()
    assert found == [False, True, True, True, True, True, False, False]
    watch.forget()


def test_what_is_forgotten_is_not_watched(memory: Memory) -> None:
    gc.collect()
    watch, before = WriteWatch(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        watch.watch(*memory.blocks())
        watch.forget()
        watch.forget()
        assert not watch.unwritten(*memory.blocks()).any()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not watched_mappings()


def watched_mappings() -> int:
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    return sum("uw" in line.split() for line in lines if line.startswith("VmFlags:"))


def test_a_watch_ends_with_its_owner(memory: Memory) -> None:
    gc.collect()
    before = watched_mappings()
    watch = WriteWatch()
    watch.watch(*memory.blocks())
    assert watched_mappings() == before + 1
    del watch
    assert watched_mappings() == before


def test_a_new_watch_ends_the_former_one(memory: Memory) -> None:
    first, second = WriteWatch(), WriteWatch()
    first.watch(*memory.blocks())
    memory.bytes[BLOCK] = 2
    second.watch(*memory.blocks())
    assert not first.unwritten(*memory.blocks()).any()  # it would not know of that write any more
    memory.bytes[3 * BLOCK] = 2
    first.forget()
    assert second.unwritten(*memory.blocks()).tolist() == [block != 3 for block in range(8)]
    second.forget()


def test_memory_may_be_unmapped_before_it_is_forgotten() -> None:
    memory, watch = Memory(4), WriteWatch()
    blocks = memory.blocks()
    watch.watch(*blocks)
    del memory
    watch.forget()
    assert not watch.unwritten(*blocks).any()


@pytest.mark.parametrize("missing", ["system call", "machine"])
def test_without_the_kernels_help_everything_counts_as_written(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "machine":
        monkeypatch.setattr(writes, "_SYSTEM_CALL", {})
    else:
        monkeypatch.setattr(writes, "_SYSTEM_CALL", dict.fromkeys(writes._SYSTEM_CALL, 100_000))
    monkeypatch.setattr(writes, "_userfaultfd", writes._userfaultfd.__wrapped__)
    memory, watch = Memory(4), WriteWatch()
    watch.watch(*memory.blocks())
    assert not watch.unwritten(*memory.blocks()).any()
    watch.forget()


def test_shared_memory_counts_as_written() -> None:
    """Who else writes to it, this process's books do not show."""
    room = mmap.mmap(-1, 5 * BLOCK)
    address = -(-view_address(memoryview(room)) // BLOCK) * BLOCK
    populate(address, 4 * BLOCK)
    watch, blocks = WriteWatch(), (address + np.arange(4) * BLOCK, np.full(4, BLOCK))
    watch.watch(*blocks)
    assert not watch.unwritten(*blocks).any()
    watch.forget()
