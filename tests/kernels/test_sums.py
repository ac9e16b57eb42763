"""Chunks hashed, compared and copied by C are those that Python would have hashed, compared and copied."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from xxhash import xxh3_128_intdigest

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.kernels import copying, sums, uncached
from gpuslice.kernels.copying import CHUNK_BYTES

STEP_BYTES = 256
SIZES = (1, 240, 255, 256, 257, 4096, 65_537, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    sums.load.cache_clear()
    yield
    sums.load.cache_clear()


class Arena:
    """Storages one behind the other, padded to 256 bytes; and an inspector of copies to there."""

    def __init__(self, storages: list[torch.UntypedStorage]) -> None:
        sizes = [storage.nbytes() for storage in storages]
        ends = np.cumsum([-(-nbytes // STEP_BYTES) * STEP_BYTES for nbytes in sizes]).tolist()
        starts = [0, *ends[:-1]]
        self.pairs = list(zip(storages, starts, strict=True))
        self.chunks = [
            (at, min(at + CHUNK_BYTES, end))
            for start, end in zip(starts, ends, strict=True)
            for at in range(start, end, CHUNK_BYTES)
        ]
        self.memory = memoryview(bytearray(b"\xff" * ends[-1]))
        self.sums = sums.Sums(np.array(self.chunks), np.zeros(0, sums.ROW), np.zeros(0, sums.ROW))
        self.next_snapshot(np.zeros(len(self.chunks), sums.ROW))

    def next_snapshot(self, before: np.ndarray) -> None:
        self.sums = sums.Sums(self.sums.chunks, before, np.zeros(len(self.chunks), sums.ROW))

    def __call__(self, offset: int, data: memoryview) -> bool:
        index = [start for start, _ in self.chunks].index(offset)
        end = self.chunks[index][1]
        self.memory[offset + len(data) : end] = bytes(end - offset - len(data))
        return self.sums.note(index, xxh3_128_intdigest(bytes(data).ljust(end - offset, b"\0")))

    def copy(self, threads: int = 2) -> dict[str, int]:
        return dict(copying.copy_out(self.pairs, self.memory, self, threads).paths)


def storages() -> list[torch.UntypedStorage]:
    rng = np.random.default_rng(3)
    return [
        torch.from_numpy(rng.integers(0, 256, size, np.uint8)).clone().untyped_storage() for size in SIZES
    ]


def _by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "load", lambda: (None, "not here"))


@pytest.mark.parametrize("past_caches", [False, True])
def test_c_and_python_do_the_same(monkeypatch: pytest.MonkeyPatch, past_caches: bool) -> None:
    _, problem = sums.load()
    if problem:
        pytest.skip(problem)
    if past_caches:
        monkeypatch.setattr(uncached, "SMALLEST_BYTES", 0)
    state = storages()
    one, other = Arena(state), Arena(state)
    history = []
    for changed in ([], [0], [4, 8, len(SIZES) - 1]):
        for number in changed:
            state[number][SIZES[number] - 1] ^= 1
        moved = one.copy()
        with monkeypatch.context() as patch:
            _by_python(patch)
            assert other.copy() == moved
        assert one.memory == other.memory
        assert np.array_equal(one.sums.now, other.sums.now)
        assert one.sums.now["known"].all()
        history.append(moved.get("unchanged", 0))
        for arena in (one, other):
            arena.next_snapshot(arena.sums.now)
    last = [257, CHUNK_BYTES, CHUNK_BYTES]
    assert history == [0, sum(SIZES) - 1, sum(SIZES) - sum(last)]


def test_what_the_arena_has_is_let_be() -> None:
    """Only the checksum says so: the arena is not compared byte by byte, and not written."""
    if sums.load()[0] is None:
        pytest.skip(sums.load()[1])
    arena = Arena(storages())
    arena.copy()
    arena.next_snapshot(arena.sums.now)
    at = arena.chunks[6][0]
    arena.memory[at] ^= 1
    damaged = bytes(arena.memory)
    assert arena.copy() == {"unchanged": sum(SIZES)}
    assert bytes(arena.memory) == damaged


@pytest.mark.parametrize("offset", [-256, 128, 1 << 40])
def test_what_does_not_lie_as_its_checksums_is_refused_before_anything_is_written(offset: int) -> None:
    arena = Arena(storages())
    arena.pairs[3] = (arena.pairs[3][0], offset)
    with pytest.raises(ValueError, match=r"does not (fit|lie)"):
        arena.copy()
    assert set(bytes(arena.memory[:4096])) == {0xFF}


def test_nothing_is_copied_of_nothing() -> None:
    arena = Arena(storages())
    arena.pairs = []
    assert arena.copy() == {}


def test_without_a_compiler_python_does_it_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(source: object) -> None:
        raise EnvironmentUnusableError("there is no C compiler here", "install gcc, or set CC")

    monkeypatch.setattr(sums, "shared_library", none)
    arena = Arena(storages())
    transfer = copying.copy_out(arena.pairs, arena.memory, arena, 2)
    assert transfer.fallbacks == (
        "checksums are taken one by one: there is no C compiler here (install gcc, or set CC)",
    )
    assert arena.sums.now["known"].all()


def test_another_hash_than_the_packages_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if sums.load()[0] is None:
        pytest.skip(sums.load()[1])
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    forgetful = kind(lambda state, data, nbytes: 0)
    table = sums._hasher()
    table[3] = ctypes.cast(forgetful, ctypes.c_void_p).value
    monkeypatch.setattr(sums, "_hasher", lambda: table)
    sums.load.cache_clear()
    assert sums.load() == (None, "checksums are taken one by one: xxhash's functions are not what they seem")


@pytest.mark.parametrize("module", ["xxhash.version", "xxhash.no_such_module"])
def test_a_package_that_exports_nothing_is_let_be(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr(sums, "_MODULE", module)
    copier, problem = sums.load()
    assert copier is None
    assert problem.startswith("checksums are taken one by one: ")
