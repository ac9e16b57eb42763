"""The copy pipeline of a GPU, over lanes whose work is put off until somebody waits for it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from gpuslice.kernels.cuda import copy_plan
from gpuslice.kernels.cuda.copies import GpuCopy
from gpuslice.kernels.host.copies import CHUNK_BYTES
from gpuslice.kernels.transfer import Pairs

from ...fakes.host_engine import HostEngine, HostLane, build_kernels
from ...patience import PATIENCE_S
from ..checksums import Remembered, checksum_reference

KIB, MIB = 1 << 10, 1 << 20
#: Scalars, odd sizes, and large ones of several chunks and blocks.
SIZES = [4, 1000, 0, 70_001, 3 * MIB, 4, CHUNK_BYTES, 5 * CHUNK_BYTES + 3, 256, 900 * KIB]
SMALL = [size for size in SIZES if 0 < size < MIB]
LARGE = [size for size in SIZES if size >= MIB]
GAP = 0xEE


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def engine(kernels: ctypes.CDLL) -> HostEngine:
    return HostEngine(kernels)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpuslice-copy")]


def laid_out(sizes: list[int]) -> tuple[Pairs, memoryview]:
    """Random storages; large ones at pages, small ones behind them at multiples of 256, as in a snapshot."""
    generator = torch.Generator().manual_seed(3)
    storages = [
        torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator).untyped_storage() for n in sizes
    ]
    offsets, position = {}, 4096
    for large in (True, False):
        for number, nbytes in enumerate(sizes):
            if (nbytes >= MIB) is large:
                offsets[number] = position
                step = 4096 if large else 256
                position += -(-nbytes // step) * step
    arena = memoryview(bytearray([GAP]) * (position + 512))
    return [(storage, offsets[number]) for number, storage in enumerate(storages)], arena


def content(storage: torch.UntypedStorage) -> bytes:
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())


def reference(pairs: Pairs) -> dict[int, int]:
    """The checksums of all chunks, by offset."""
    return {
        offset + at: checksum_reference(content(storage)[at : at + CHUNK_BYTES])
        for storage, offset in pairs
        for at in range(0, storage.nbytes(), CHUNK_BYTES)
    }


def round_trip(engine: HostEngine) -> tuple[dict[str, int], dict[str, int]]:
    """Out and back, every byte compared; the paths of both."""
    pairs, arena = laid_out(SIZES)
    expected = [content(storage) for storage, _ in pairs]
    out = GpuCopy(engine, pairs, arena, 2).out(None, None)
    for (_, offset), data in zip(pairs, expected, strict=True):
        assert arena[offset : offset + len(data)] == data
        rest = -(offset + len(data)) % 256
        assert bytes(arena[offset + len(data) : offset + len(data) + rest]) in (
            bytes(rest),
            bytes([GAP]) * rest,
        )
    assert bytes(arena[:4096]) == bytes([GAP]) * 4096
    assert bytes(arena[-512:]) == bytes([GAP]) * 512
    for storage, _ in pairs:
        storage.fill_(0)
    back = GpuCopy(engine, pairs, arena.toreadonly(), 2).back(None)
    assert [content(storage) for storage, _ in pairs] == expected
    return dict(out.paths), dict(back.paths)


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("staging_bytes", [100 * KIB, 64 * MIB])
def test_every_byte_goes_out_and_comes_back(
    kernels: ctypes.CDLL, lanes: int, staging_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_plan, "STAGING_BYTES", staging_bytes)
    paths = round_trip(HostEngine(kernels, lanes))
    assert paths == ({"packed": sum(SMALL), "direct": sum(LARGE)},) * 2


def test_what_has_arrived_is_inspected_while_the_rest_is_queued(
    engine: HostEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second block is not queued before somebody has looked at the first one."""
    inspected, queued, copy = threading.Event(), [], HostLane.copy

    def waiting_copy(lane: HostLane, target: torch.Tensor, source: torch.Tensor) -> None:
        queued.append(lane)
        if len(queued) == 2:
            assert inspected.wait(PATIENCE_S)
        copy(lane, target, source)

    def inspect(offset: int, data: memoryview) -> bool:
        inspected.set()
        return True

    monkeypatch.setattr(HostLane, "copy", waiting_copy)
    pairs, arena = laid_out([4 * CHUNK_BYTES] * 2)
    GpuCopy(engine, pairs, arena, 2).out(inspect, None)
    assert len(queued) == 2


def test_all_small_storages_take_one_launch_and_one_copy(engine: HostEngine) -> None:
    pairs, arena = laid_out([100] * 500)
    transfer = GpuCopy(engine, pairs, arena, 2).out(None, None)
    assert (engine.launched, len(engine.copied)) == (["host_gather"], 1)
    assert (transfer.launches, transfer.copies, transfer.fallbacks) == (1, 1, ())
    back = GpuCopy(engine, pairs, arena, 2).back(None)
    assert engine.launched == ["host_gather", "host_scatter"]
    assert (back.launches, back.copies) == (1, 1)


def test_without_kernels_they_are_copied_one_by_one_and_it_is_said(engine: HostEngine) -> None:
    engine.missing = "the GPU kernels need CuPy"
    assert round_trip(engine) == ({"direct": sum(SIZES)},) * 2
    assert engine.launched == []
    pairs, arena = laid_out(SIZES)
    transfer = GpuCopy(engine, pairs, arena, 2).out(None, Remembered(pairs))
    assert transfer.fallbacks == (
        "small storages are copied one by one: the GPU kernels need CuPy",
        "checksums are taken by the host: the GPU kernels need CuPy",
    )


def test_without_memory_to_gather_in_they_are_copied_one_by_one(engine: HostEngine) -> None:
    engine.free_bytes = 900 * KIB
    assert round_trip(engine) == ({"direct": sum(SIZES)},) * 2
    pairs, arena = laid_out(SIZES)
    (fallback,) = GpuCopy(engine, pairs, arena, 2).back(None).fallbacks
    assert fallback.startswith("small storages are copied one by one: ")


@pytest.mark.parametrize("threads", [1, 4])
def test_an_inspector_sees_chunks_that_have_arrived_and_chunks_before_they_leave(
    engine: HostEngine, threads: int
) -> None:
    pairs, arena = laid_out(SIZES)
    expected = b"".join(content(storage) for storage, _ in sorted(pairs, key=lambda pair: pair[1]))
    seen: dict[int, bytes] = {}

    def note(offset: int, data: memoryview) -> bool:
        seen[offset] = bytes(data)
        return True

    GpuCopy(engine, pairs, arena, threads).out(note, None)
    assert b"".join(seen[offset] for offset in sorted(seen)) == expected
    assert max(map(len, seen.values())) == CHUNK_BYTES
    seen.clear()
    GpuCopy(engine, pairs, arena, threads).back(note)
    assert b"".join(seen[offset] for offset in sorted(seen)) == expected


def test_two_steps_do_not_mix_in_one_staging_buffer(
    kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has queued a copy gives the other thread time to come in between, which it must not."""
    engine = HostEngine(kernels, lanes=1)
    monkeypatch.setattr(copy_plan, "STAGING_BYTES", 64 * KIB)
    pairs, arena = laid_out([50 * KIB, 60 * KIB, 40 * KIB, 64 * KIB])
    expected = [content(storage) for storage, _ in pairs]
    GpuCopy(engine, pairs, arena, 2).out(None, None)
    for storage, _ in pairs:
        storage.fill_(0)
    meeting = threading.Barrier(2)

    def wait_for_another() -> None:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.3)

    engine.on_copy = wait_for_another
    back = GpuCopy(engine, pairs, arena, 2).back(lambda offset, data: True)
    assert back.launches == 4
    assert [content(storage) for storage, _ in pairs] == expected


def test_what_is_refused_on_the_way_in_never_leaves_the_arena(engine: HostEngine) -> None:
    pairs, arena = laid_out([3 * CHUNK_BYTES])
    storage, start = pairs[0]
    storage.fill_(7)

    def refuse(offset: int, data: memoryview) -> bool:
        raise LookupError(offset)

    with pytest.raises(LookupError):
        GpuCopy(engine, [(storage, start)], arena, 2).back(refuse)
    assert content(storage) == bytes([7]) * storage.nbytes()


def test_what_an_inspector_raises_ends_the_copy_after_all_lanes(engine: HostEngine) -> None:
    pairs, arena = laid_out(SIZES)

    def refuse(offset: int, data: memoryview) -> bool:
        raise LookupError(offset)

    with pytest.raises(LookupError):
        GpuCopy(engine, pairs, arena, 3).out(refuse, None)
    assert engine.waits >= 2
    for storage, offset in pairs:
        assert arena[offset : offset + storage.nbytes()] == content(storage), "nothing is under way any more"


def test_an_interrupt_waits_until_nothing_is_under_way(engine: HostEngine) -> None:
    pairs, arena = laid_out(SIZES)
    engine.interrupts = [KeyboardInterrupt(), KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        GpuCopy(engine, pairs, arena, 1).out(None, None)
    for storage, offset in pairs:
        assert arena[offset : offset + storage.nbytes()] == content(storage)


def test_a_failed_gpu_is_not_waited_for_for_ever(engine: HostEngine) -> None:
    pairs, arena = laid_out(SIZES)
    engine.interrupts = [RuntimeError("CUDA error: an illegal memory access was encountered")] * 2
    with pytest.raises(RuntimeError, match="illegal memory access"):
        GpuCopy(engine, pairs, arena, 1).out(None, None)


def test_chunks_that_are_there_are_neither_copied_nor_inspected(engine: HostEngine) -> None:
    pairs, arena = laid_out(SIZES)
    checksums = Remembered(pairs)
    first = GpuCopy(engine, pairs, arena, 2).out(None, checksums)
    assert first.paths == {"packed": sum(SMALL), "direct": sum(LARGE)}
    assert engine.launched == ["host_checksum", "host_gather"]
    assert checksums.sums == reference(pairs)
    storage, _ = pairs[SIZES.index(5 * CHUNK_BYTES + 3)]
    storage[CHUNK_BYTES + 9] ^= 1
    storage[5 * CHUNK_BYTES + 2] ^= 1
    seen = []

    def note(offset: int, data: memoryview) -> bool:
        seen.append(offset)
        return True

    second = GpuCopy(engine, pairs, arena, 2).out(note, checksums)
    assert second.paths["unchanged"] == sum(LARGE) - CHUNK_BYTES - 3
    assert second.paths["direct"] == CHUNK_BYTES + 3
    assert seen == []
    assert checksums.sums == reference(pairs)
    for storage, offset in pairs:
        assert arena[offset : offset + storage.nbytes()] == content(storage)


@pytest.mark.parametrize("number", [number for number, size in enumerate(SIZES) if size])
def test_what_comes_back_is_summed_where_it_arrives(engine: HostEngine, number: int) -> None:
    pairs, arena = laid_out(SIZES)
    checksums = Remembered(pairs)
    GpuCopy(engine, pairs, arena, 2).out(None, checksums)
    expected, told = dict(checksums.sums), Remembered(pairs)
    back = GpuCopy(engine, pairs, arena, 2).back(unwanted, told)
    assert (back.launches, told.sums) == (2, expected)
    storage, offset = pairs[number]
    last = offset + storage.nbytes() - 1
    arena[last] ^= 1
    GpuCopy(engine, pairs, arena, 2).back(unwanted, told)
    assert {at for at, value in told.sums.items() if value != expected[at]} == {
        max(at for at in expected if at <= last)
    }


def unwanted(offset: int, data: memoryview) -> bool:
    raise AssertionError(f"the chunk at {offset} is summed by the GPU")


def test_without_memory_for_checksums_the_host_takes_them(engine: HostEngine) -> None:
    pairs, arena = laid_out([2 * MIB, 3 * MIB])
    engine.free_bytes = 0
    checksums, seen = Remembered(pairs), []

    def look(offset: int, data: memoryview) -> bool:
        seen.append((offset, bytes(data)))
        return True

    expected = [(offset, content(storage)) for storage, offset in pairs]
    transfer = GpuCopy(engine, pairs, arena, 2).out(look, checksums)
    assert transfer.paths == {"direct": 5 * MIB}
    fallbacks = ("checksums are taken by the host: too little memory of the GPU is free",)
    assert (transfer.fallbacks, checksums.sums, sorted(seen)) == (fallbacks, {}, expected)
    seen.clear()
    assert GpuCopy(engine, pairs, arena, 2).back(look, checksums).fallbacks == fallbacks
    assert (checksums.sums, sorted(seen)) == ({}, expected)


def test_a_storage_at_an_odd_address_is_inspected(engine: HostEngine) -> None:
    buffer = torch.zeros(2 * MIB + 1, dtype=torch.uint8)
    odd = torch.frombuffer(buffer.numpy().data[1:], dtype=torch.uint8).untyped_storage()
    assert odd.data_ptr() % 16 == 1
    arena, seen = memoryview(bytearray(2 * MIB)), []

    def look(offset: int, data: memoryview) -> bool:
        seen.append(offset)
        return True

    checksums = Remembered([(odd, 0)])
    transfer = GpuCopy(engine, [(odd, 0)], arena, 1).out(look, checksums)
    assert (transfer.paths, checksums.sums, seen) == ({"direct": 2 * MIB}, {}, [0])


def test_what_does_not_fit_is_refused_before_anything_is_queued(engine: HostEngine) -> None:
    pairs, arena = laid_out([100, 200])
    outside = torch.ones(64, dtype=torch.uint8).untyped_storage()
    with pytest.raises(ValueError, match="does not fit"):
        GpuCopy(engine, [*pairs, (outside, len(arena) - 63)], arena, 1).out(None, None)
    assert engine.copied == engine.launched == []
