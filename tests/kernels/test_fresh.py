"""Memory for storages: where it is faulted in ahead, that it stays in bounds and changes nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from gpuslice.kernels import fresh, glibc
from gpuslice.kernels.host import HUGE_PAGE_BYTES

BLOCK = HUGE_PAGE_BYTES


class Heap:
    """A heap of nobody's, whose end is where the test puts it; notes which blocks are faulted in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: int, last: int) -> None:
        self.start, self.end = first * BLOCK, last * BLOCK
        self.advised: list[int] = []
        self.brought: list[int] = []
        monkeypatch.setattr(glibc, "heap_start", lambda: self.start)
        monkeypatch.setattr(glibc, "heap_end", lambda: self.end)
        monkeypatch.setattr(
            fresh, "put_behind_huge_pages", lambda blocks: self.advised.extend(blocks.tolist())
        )
        monkeypatch.setattr(fresh, "present_pages", lambda block: 512 if block == 106 else 0)
        monkeypatch.setattr(fresh, "populate", self.populate)

    def populate(self, address: int, nbytes: int) -> None:
        assert self.start <= address
        assert address + nbytes <= self.end
        self.brought.extend(range(address // BLOCK, (address + nbytes) // BLOCK))


def test_where_the_heap_grows_all_that_follow_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch, 90, 100)
    wanted = fresh._Heap([3 * BLOCK] * 4, threads=2)
    heap.end = 112 * BLOCK
    wanted.gave(100 * BLOCK + 64, 3 * BLOCK)
    assert set(range(100, 112)) <= set(heap.advised)
    assert sorted(heap.brought) == [103, 109], "106 is there already"


def test_storages_in_sequence_are_looked_after_as_far_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch, 90, 200)
    wanted = fresh._Heap([BLOCK] * 9, threads=1)
    at = [120 * BLOCK + 64 + number * (BLOCK + 64) for number in range(4)]
    wanted.gave(at[0], BLOCK)
    assert heap.brought == []
    wanted.gave(at[1], BLOCK)
    assert heap.brought == [122, 123]
    wanted.gave(at[2], BLOCK)
    assert heap.brought == [122, 123]
    wanted.gave(at[3], BLOCK)
    assert heap.brought == [122, 123, 124, 125, 126, 127]


def test_storages_elsewhere_are_not_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch, 90, 200)
    wanted = fresh._Heap([BLOCK] * 9, threads=1)
    for block in (
        120,
        110,
        130,
        95,
        300,
        301,
        40,
        41,
    ):  # scattered; behind it; before it
        wanted.gave(block * BLOCK, BLOCK)
    assert heap.brought == []


def test_nothing_behind_the_end_of_the_heap_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch, 90, 100)
    wanted = fresh._Heap([BLOCK] * 50, threads=1)
    heap.end = 103 * BLOCK
    wanted.gave(100 * BLOCK + 64, BLOCK)
    assert heap.brought == [101, 102]


def test_a_kernel_that_brings_no_page_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch, 90, 100)

    def refuse(address: int, nbytes: int) -> None:
        raise OSError(12, "there are not enough pages")

    monkeypatch.setattr(fresh, "populate", refuse)
    wanted = fresh._Heap([BLOCK] * 50, threads=2)
    heap.end = 200 * BLOCK
    wanted.gave(100 * BLOCK + 64, BLOCK)


def test_bytes_of_others_stay() -> None:
    """Small and large storages between live ones of every size, some freed and given back again."""
    sizes = [100, 70_000, 3_000_000, 200, 5_000_000, 40_000_000] * 4
    tensors = [torch.full((size,), number, dtype=torch.uint8) for number, size in enumerate(sizes)]
    gone, kept = tensors[::2], tensors[1::2]
    wanted = [(tensor.untyped_storage(), tensor.nbytes) for tensor in gone]
    for storage, _ in wanted:
        storage.resize_(0)
    fresh.take(wanted, 2)
    for tensor in gone:
        tensor.fill_(255)
    assert [tensor.nbytes for tensor in gone] == sizes[::2]
    for number, tensor in zip(range(1, len(sizes), 2), kept, strict=True):
        assert np.all(tensor.numpy() == number)


IN_A_CHILD = """
import threading
import torch
from gpuslice.kernels import fresh, glibc
tensors = [torch.ones(size) for size in [300_000, 2_000_000, 10_000_000] * 6]
wanted = [(tensor.untyped_storage(), tensor.nbytes) for tensor in tensors]
def empty():
    for storage, _ in wanted:
        storage.resize_(0)
empty()
"""
GROWN = """
before = glibc.heap_end()
fresh.take(wanted, 2)
large = [tensor for tensor in tensors if tensor.nbytes < glibc.OWN_MAPPING_BYTES]
inside = [before <= tensor.data_ptr() < glibc.heap_end() for tensor in large]
print(sum(inside), len(large), glibc.heap_end() - before >= sum(tensor.nbytes for tensor in large) / 2)
"""
IN_A_THREAD = """
thread = threading.Thread(target=fresh.take, args=(wanted, 2))
thread.start()
thread.join()
print([tensor.fill_(3).sum().item() == 3 * tensor.numel() for tensor in tensors].count(True), len(tensors))
"""


def _child(code: str) -> str:
    command = [sys.executable, "-c", IN_A_CHILD + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip()


def test_the_heap_grows_at_once() -> None:
    if glibc._mallopt() is None:
        pytest.skip("malloc is another one's, or tuned")
    inside, large, at_once = _child(GROWN).split()
    assert int(inside) >= int(large) // 2
    assert at_once == "True"


class Tight:
    """A storage for which there is memory only while the heap does not grow by more than it needs."""

    def __init__(self, room: list[int]) -> None:
        self.room, self.size = room, 0

    def resize_(self, size: int) -> None:
        if self.room[0] < size:
            raise RuntimeError("can't allocate memory")
        self.size = size

    def nbytes(self) -> int:
        return self.size

    def data_ptr(self) -> int:
        return 1 << 40


def test_what_fits_one_by_one_is_not_refused_for_growing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    room = [10]

    @contextmanager
    def growing_by(nbytes: int) -> Iterator[None]:
        room[0] -= nbytes
        yield
        room[0] += nbytes

    def trim() -> None:
        room[0] = 1 << 20

    monkeypatch.setattr(glibc, "growing_by", growing_by)
    monkeypatch.setattr(fresh, "trim_heap", trim)
    storages: list[Any] = [Tight(room), Tight(room)]
    fresh.take([(storage, 1 << 20) for storage in storages], 1)
    assert [storage.nbytes() for storage in storages] == [1 << 20, 1 << 20]
    with pytest.raises(RuntimeError, match="can't allocate"):
        fresh.take([(storage, 2 << 20) for storage in storages], 1)


def test_a_thread_gets_memory_from_another_heap() -> None:
    assert _child(IN_A_THREAD) == "18 18"
