"""Copies by several threads: every byte, no thread left behind, and nothing touched after a failure."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from gpuslice.kernels.host import copies
from gpuslice.kernels.host.copies import CHUNK_BYTES
from gpuslice.kernels.transfer import Pairs

from ...patience import PATIENCE_S

SIZES = [0, 5, 70_000, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 77, 9]


def scattered(sizes: list[int], gap: int = 64) -> tuple[Pairs, memoryview]:
    """Storages of random bytes, and an arena in which they lie backwards and with gaps."""
    generator = torch.Generator().manual_seed(1)
    storages = [
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).untyped_storage()
        for size in sizes
    ]
    arena = memoryview(bytearray(sum(sizes) + gap * (len(sizes) + 1)))
    pairs, end = [], len(arena)
    for storage in storages:
        end -= storage.nbytes() + gap
        pairs.append((storage, end))
    return pairs, arena


def content(storage: torch.UntypedStorage) -> bytes:
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_byte_arrives_and_the_gaps_stay(threads: int) -> None:
    pairs, arena = scattered(SIZES)
    moved = copies.copy_out(pairs, arena, None, threads)
    assert moved.paths == {"host": sum(SIZES)}
    expected = [content(storage) for storage, _ in pairs]
    for (_, offset), data in zip(pairs, expected, strict=True):
        assert arena[offset : offset + len(data)] == data
        assert bytes(arena[offset + len(data) : offset + len(data) + 64]) == bytes(64)
    for storage, _ in pairs:
        storage.fill_(7)
    copies.copy_in(pairs, arena.toreadonly(), None, threads)
    assert [content(storage) for storage, _ in pairs] == expected
    assert not [t for t in threading.enumerate() if t.name.startswith("gpuslice-copy")]


def test_what_the_inspector_declines_is_not_copied() -> None:
    pairs, arena = scattered([4 * CHUNK_BYTES])
    (_, offset) = pairs[0]
    moved = copies.copy_out(pairs, arena, lambda at, data: at != offset + CHUNK_BYTES, 2)
    assert moved.paths == {"host": 3 * CHUNK_BYTES, "unchanged": CHUNK_BYTES}
    data = content(pairs[0][0])
    assert arena[offset : offset + CHUNK_BYTES] == data[:CHUNK_BYTES]
    assert not any(arena[offset + CHUNK_BYTES : offset + 2 * CHUNK_BYTES])
    assert arena[offset + 2 * CHUNK_BYTES : offset + 4 * CHUNK_BYTES] == data[2 * CHUNK_BYTES :]


def test_a_failure_in_any_thread_is_raised_and_ends_the_others() -> None:
    pairs, arena = scattered([40 * CHUNK_BYTES])
    seen = []

    def refuse(offset: int, data: memoryview) -> bool:
        seen.append(offset)
        raise LookupError(offset)

    with pytest.raises(LookupError):
        copies.copy_out(pairs, arena, refuse, 2)
    assert len(seen) <= 2


def test_an_interrupt_waits_until_no_thread_touches_the_memory() -> None:
    """Ctrl-C arrives while another thread is in the middle of a chunk."""
    pairs, arena = scattered([4 * CHUNK_BYTES])
    working, interrupted = threading.Event(), threading.Event()
    ended: list[int] = []

    def slow(offset: int, data: memoryview) -> bool:
        if threading.current_thread() is threading.main_thread():
            assert working.wait(PATIENCE_S)
            interrupted.set()
            signal.raise_signal(signal.SIGINT)
        working.set()
        assert interrupted.wait(PATIENCE_S)
        ended.append(offset)
        return True

    with pytest.raises(KeyboardInterrupt):
        copies.copy_out(pairs, arena, slow, 2)
    count = len(ended)
    assert count >= 1
    assert not [t for t in threading.enumerate() if t.name.startswith("gpuslice-copy")]
    assert len(ended) == count


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failure_keeps_nothing_alive(threads: int) -> None:
    class Held:
        pass

    def fail(_: int) -> None:
        held = Held()
        seen.append(weakref.ref(held))
        raise LookupError

    seen: list[weakref.ref[Held]] = []
    gc.disable()
    try:
        with pytest.raises(LookupError) as caught:
            copies.run([[0]], fail, threads)
        del caught
        assert seen[0]() is None
    finally:
        gc.enable()


def test_without_more_threads_the_caller_does_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pairs, arena = scattered(SIZES)
    copies.copy_out(pairs, arena, None, 4)
    for storage, offset in pairs:
        assert arena[offset : offset + storage.nbytes()] == content(storage)


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    pairs, arena = scattered([100, 200])
    storage = torch.ones(300, dtype=torch.uint8).untyped_storage()
    with pytest.raises(ValueError, match="does not fit"):
        copies.copy_out([*pairs, (storage, len(arena) - 299)], arena, None, 2)
    assert not any(arena)


def test_what_is_damaged_is_not_delivered() -> None:
    """By one thread all before it is whole, and neither it nor what follows has been touched."""
    pairs, arena = scattered([300, 3 * CHUNK_BYTES])
    copies.copy_out(pairs, arena, None, 1)
    before = [content(storage) for storage, _ in pairs]
    wrong = pairs[1][1] + CHUNK_BYTES
    for storage, _ in pairs:
        storage.fill_(7)

    def check(offset: int, data: memoryview) -> bool:
        if offset == wrong:
            raise LookupError(offset)
        return True

    with pytest.raises(LookupError):
        copies.copy_in(pairs, arena, check, 1)
    small, large = (content(storage) for storage, _ in pairs)
    assert large == before[1][:CHUNK_BYTES] + bytes([7]) * (2 * CHUNK_BYTES)
    assert small in (before[0], bytes([7]) * 300)


def test_what_lies_beyond_the_arena_is_refused() -> None:
    storage = torch.zeros(7, dtype=torch.uint8).untyped_storage()
    with pytest.raises(ValueError, match="a storage of 7 bytes does not fit at 194 of 200 bytes"):
        copies.copy_in([(storage, 194)], memoryview(bytes(200)), None, 2)


def test_nothing_is_copied_of_nothing() -> None:
    assert copies.copy_out([], memoryview(b""), None, 2) == copies.copy_in([], memoryview(b""), None, 2)


@pytest.fixture(autouse=True)
def _default_interrupt() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("place", [(-1, 4), (97, 4), (0, 101)])
def test_what_does_not_fit_the_arena_is_refused(place: tuple[int, int]) -> None:
    copies.check([(96, 4)], 100)
    with pytest.raises(ValueError, match="does not fit"):
        copies.check([(0, 1), place], 100)
