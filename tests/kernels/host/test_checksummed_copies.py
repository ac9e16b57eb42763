"""Chunks hashed, compared and copied by C are those that Python would have hashed, compared and copied."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.kernels.host import checksummed_copies, copies
from gpuslice.kernels.host.copies import CHUNK_BYTES
from gpuslice.kernels.host.process_memory import HugePages, address_space
from gpuslice.kernels.transfer import Transfer

STEP_BYTES = 256
SIZES = (1, 240, 255, 256, 257, 4096, 65_537, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    checksummed_copies.load.cache_clear()
    yield
    checksummed_copies.load.cache_clear()


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
        self.sums = checksummed_copies.Sums(
            np.array(self.chunks), np.zeros(0, checksummed_copies.ROW), np.zeros(0, checksummed_copies.ROW)
        )
        self.next_snapshot(np.zeros(len(self.chunks), checksummed_copies.ROW))

    def next_snapshot(self, before: np.ndarray) -> None:
        self.sums = checksummed_copies.Sums(
            self.sums.chunks, before, np.zeros(len(self.chunks), checksummed_copies.ROW)
        )

    def __call__(self, offset: int, data: memoryview) -> bool:
        index = [start for start, _ in self.chunks].index(offset)
        end = self.chunks[index][1]
        self.memory[offset + len(data) : end] = bytes(end - offset - len(data))
        return self.sums.note(index, xxh3_128_intdigest(bytes(data).ljust(end - offset, b"\0")))

    def copy(self, threads: int = 2) -> dict[str, int]:
        return dict(copies.copy_out(self.pairs, self.memory, self, threads).paths)


class Check:
    """An inspector of copies from an `Arena`, which expects what has been copied there."""

    def __init__(self, arena: Arena) -> None:
        self._memory = arena.memory
        self.expected = checksummed_copies.Expected(
            arena.sums.chunks, arena.sums.now["low"].copy(), LookupError
        )

    def __call__(self, offset: int, data: memoryview) -> bool:
        starts, ends = self.expected.chunks.T.tolist()
        index = starts.index(offset)
        if xxh3_64_intdigest(self._memory[offset : ends[index]]) != int(self.expected.lows[index]):
            raise self.expected.damaged(offset)
        return True


def storages() -> list[torch.UntypedStorage]:
    rng = np.random.default_rng(3)
    return [
        torch.from_numpy(rng.integers(0, 256, size, np.uint8)).clone().untyped_storage() for size in SIZES
    ]


def content(storage: torch.UntypedStorage) -> bytes:
    return bytes(address_space()[storage.data_ptr() : storage.data_ptr() + storage.nbytes()])


def _by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksummed_copies, "load", lambda: (None, "not here"))


def test_c_and_python_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _needs_c()
    state = storages()
    one, other = Arena(state), Arena(state)
    history = []
    for changed in ([], [(0, 0)], [(4, -1), (7, 0), (8, 0), (len(SIZES) - 1, -1)]):
        for number, byte in changed:
            state[number][byte % SIZES[number]] ^= 1
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
    last = [257, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES]
    assert history == [0, sum(SIZES) - 1, sum(SIZES) - sum(last)]


def _needs_c() -> None:
    if checksummed_copies.load()[0] is None:
        pytest.skip(checksummed_copies.load()[1])


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("python", [False, True])
def test_every_byte_comes_back(monkeypatch: pytest.MonkeyPatch, checked: bool, python: bool) -> None:
    _needs_c()
    state = storages()
    arena = Arena(state)
    arena.copy()
    there, before = bytes(arena.memory), [content(storage) for storage in state]
    for storage in state:
        storage.fill_(7)
    if python:
        _by_python(monkeypatch)
    transfer = copies.copy_in(arena.pairs, arena.memory.toreadonly(), Check(arena) if checked else None, 2)
    assert transfer.paths == {"host": sum(SIZES)}
    assert transfer.fallbacks == (("not here",) if python else ())
    assert [content(storage) for storage in state] == before
    assert bytes(arena.memory) == there


#: The first chunk, one in the middle of a portion, one of a large storage, the last one; and padding.
DAMAGED = [(0, 0), (4, 256), (10, 0), (-1, CHUNK_BYTES - 1), (0, 1), (0, 255), (4, 257), (4, 511)]


@pytest.mark.parametrize(("index", "byte"), DAMAGED)
def test_a_damaged_chunk_is_the_same_error_and_is_not_delivered(
    monkeypatch: pytest.MonkeyPatch, index: int, byte: int
) -> None:
    """By one thread all before it is whole, and it and all after it have not been touched."""
    _needs_c()
    state = storages()
    arena = Arena(state)
    arena.copy()
    before = b"".join(map(content, state))
    wrong = arena.chunks[index][0]
    arena.memory[wrong + byte] ^= 1
    arena.memory[-1] ^= 2  # so is the last one, which nobody gets to
    for storage in state:
        storage.fill_(7)
    with pytest.raises(LookupError) as caught:
        copies.copy_in(arena.pairs, arena.memory, Check(arena), 1)
    assert caught.value.args == (wrong,)
    reached = sum(max(0, min(wrong - offset, storage.nbytes())) for storage, offset in arena.pairs)
    after = b"".join(map(content, state))
    assert after[:reached] == before[:reached]
    assert set(after[reached:]) == {7}
    arena.memory[-1] ^= 2
    for python in (False, True):
        with monkeypatch.context() as patch:
            if python:
                _by_python(patch)
            with pytest.raises(LookupError) as caught:
                copies.copy_in(arena.pairs, arena.memory, Check(arena), 2)
            assert caught.value.args == (wrong,)


def test_what_is_copied_by_parts_needs_no_chunks() -> None:
    """Without checks it may lie anywhere, as views of a storage do."""
    source, target = torch.arange(200, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8)
    arena = memoryview(source.numpy()).toreadonly()
    places = [(target.data_ptr() + at, at, 7) for at in (3, 50, 193)]
    copies.copy_in_at(places, arena, 2)
    expected = torch.zeros(200, dtype=torch.uint8)
    for at in (3, 50, 193):
        expected[at : at + 7] = source[at : at + 7]
    assert torch.equal(target, expected)
    with pytest.raises(ValueError, match="a storage of 7 bytes does not fit at 194 of 200 bytes"):
        copies.copy_in_at([(target.data_ptr(), 194, 7)], arena, 2)


def test_pages_are_ready_before_they_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    _needs_c()
    arena = Arena(storages())
    arena.copy()
    for storage, _ in arena.pairs:
        storage.fill_(7)
    seen: list[tuple[int, int]] = []

    def note(pages: HugePages, address: int, nbytes: int) -> None:
        assert set(address_space()[address : address + nbytes]) == {7}
        seen.append((address, nbytes))

    monkeypatch.setattr(HugePages, "ready", note)
    monkeypatch.setattr(HugePages, "__init__", lambda pages, ranges: setattr(pages, "_torn", {0}))
    copies.copy_in(arena.pairs, arena.memory, Check(arena), 2)
    assert sum(nbytes for _, nbytes in seen) == sum(SIZES)
    assert len(set(seen)) == len(arena.chunks)


def test_what_the_arena_has_is_let_be() -> None:
    """Only the checksum says so: the arena is not compared byte by byte, and not written."""
    _needs_c()
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
    first = content(arena.pairs[0][0])
    with pytest.raises(ValueError, match=r"does not (fit|lie)"):
        arena.copy()
    assert set(bytes(arena.memory[:4096])) == {0xFF}
    if checksummed_copies.load()[0] is not None:
        with pytest.raises(ValueError, match=r"does not (fit|lie)"):
            copies.copy_in(arena.pairs, arena.memory, Check(arena), 2)
        assert content(arena.pairs[0][0]) == first


def test_nothing_is_copied_of_nothing() -> None:
    arena = Arena(storages())
    arena.pairs = []
    assert arena.copy() == {}
    for inspect in (None, Check(arena)):
        assert copies.copy_in([], arena.memory, inspect, 2) == Transfer()


def test_without_a_compiler_python_does_it_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(source: object) -> None:
        raise EnvironmentUnusableError("there is no C compiler here", "install gcc, or set CC")

    monkeypatch.setattr(checksummed_copies, "shared_library", none)
    arena = Arena(storages())
    transfer = copies.copy_out(arena.pairs, arena.memory, arena, 2)
    why = "chunks are copied one by one: there is no C compiler here (install gcc, or set CC)"
    assert transfer.fallbacks == (why,)
    for inspect in (None, Check(arena)):
        assert copies.copy_in(arena.pairs, arena.memory, inspect, 2).fallbacks == (why,)
    assert arena.sums.now["known"].all()


def test_another_hash_than_the_packages_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _needs_c()
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    forgetful = kind(lambda state, data, nbytes: 0)
    table = checksummed_copies._hasher()
    table[3] = ctypes.cast(forgetful, ctypes.c_void_p).value
    monkeypatch.setattr(checksummed_copies, "_hasher", lambda: table)
    checksummed_copies.load.cache_clear()
    assert checksummed_copies.load() == (
        None,
        "chunks are copied one by one: xxhash's functions are not what they seem",
    )


@pytest.mark.parametrize("module", ["xxhash.version", "xxhash.no_such_module"])
def test_a_package_that_exports_nothing_is_let_be(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr(checksummed_copies, "_MODULE", module)
    copier, problem = checksummed_copies.load()
    assert copier is None
    assert problem.startswith("chunks are copied one by one: ")
