"""Checksums taken on the way, and chunks that are not copied because nothing in them has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from gpuslice.checkpoint.format import layout
from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import CorruptSnapshotError
from gpuslice.kernels.host import copies
from gpuslice.kernels.host.process_memory import address_space

from ..harness import Broken, FaultyDevice, SpyGate, digest, flip_a_bit

MIB = 1 << 20
#: Whole chunks, an odd end that needs padding, and a storage that is small.
SIZES = (8 * MIB, 5 * MIB + 3, MIB, 1000)


class Watched(FaultyDevice):
    """The host, as the owner of a few tensors only."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._own = {tensor.untyped_storage()._cdata for tensor in tensors}

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._own


class Frozen:
    """Tensors that do not change by themselves, and a switch that moves them and nothing else."""

    def __init__(self, store: JobStore) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tensors = [
            torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in SIZES
        ]
        self.switch = Switch(Watched(self.tensors), store, gate=SpyGate())
        self.boundary = 0

    def round_trip(self) -> int:
        """Suspend and resume, exactly; returns the bytes that were not copied."""
        before = digest(*self.tensors)
        self.boundary += 1
        record = self.switch.suspend(boundary=self.boundary)
        assert self.switch.snapshot is not None
        with open_snapshot(self.switch.snapshot.path) as snapshot:
            snapshot.verify()
        for tensor in self.tensors:
            assert tensor.untyped_storage().nbytes() == 0
        self.switch.resume()
        assert digest(*self.tensors) == before
        return record.bytes_unchanged


@pytest.fixture
def frozen(shm: Path) -> Iterator[Frozen]:
    with RamDisk(shm / "delta", 128 * MIB).open_store(None) as store:
        yield Frozen(store)


ALL_BYTES = sum(SIZES)


def test_what_has_not_changed_is_not_copied(frozen: Frozen) -> None:
    assert [frozen.round_trip() for _ in range(3)] == [0, ALL_BYTES, ALL_BYTES]


def _in_place(tensor: torch.Tensor, at: int) -> None:
    tensor[at] ^= 1


def _by_data(tensor: torch.Tensor, at: int) -> None:
    tensor.data[at] ^= 1


def _by_address(tensor: torch.Tensor, at: int) -> None:
    place = tensor.data_ptr() + at
    address_space()[place : place + 1] = bytes([int(tensor[at]) ^ 1])


@pytest.mark.parametrize("write", [_in_place, _by_data, _by_address])
@pytest.mark.parametrize(
    ("number", "at"),
    [
        (0, 4 * MIB - 1),
        (3, 999),
        *(pytest.param(*place, marks=pytest.mark.repeats) for place in ((0, 0), (0, 8 * MIB - 1), (3, 0))),
        pytest.param(1, 5 * MIB + 2, marks=pytest.mark.repeats),
    ],
)
def test_one_changed_byte_is_seen_whoever_wrote_it(
    frozen: Frozen, write: Callable[[torch.Tensor, int], None], number: int, at: int
) -> None:
    frozen.round_trip()
    versions = frozen.tensors[number]._version
    write(frozen.tensors[number], at)
    if write is not _in_place:
        assert frozen.tensors[number]._version == versions, "the counter has not noticed"
    start = at // layout.CHUNK_BYTES * layout.CHUNK_BYTES
    changed = min(layout.CHUNK_BYTES, SIZES[number] - start)
    assert frozen.round_trip() == ALL_BYTES - changed


@pytest.mark.parametrize(
    ("number", "at"), [(0, 0), (0, 8 * MIB - 1), (1, 5 * MIB + 2), (1, 5 * MIB + 3), (3, 0), (3, 1023)]
)
def test_damage_is_found_when_it_comes_back(frozen: Frozen, number: int, at: int) -> None:
    """Bytes, and the padding behind them."""
    before = digest(*frozen.tensors)
    frozen.switch.suspend(boundary=1)
    snapshot = frozen.switch.snapshot
    assert snapshot is not None
    sid = [storage.nbytes for storage in snapshot.storages].index(SIZES[number])
    place = snapshot.offsets[sid] + at
    flip_a_bit(snapshot.path, place)
    with pytest.raises(CorruptSnapshotError, match=rf"storage {sid} .*is damaged"):
        frozen.switch.resume()
    assert [tensor.untyped_storage().nbytes() for tensor in frozen.tensors] == [0] * len(SIZES)
    flip_a_bit(snapshot.path, place)
    frozen.switch.resume()
    assert digest(*frozen.tensors) == before


def test_an_aborted_suspend_leaves_nothing_to_rely_on(frozen: Frozen) -> None:
    frozen.round_trip()
    device = frozen.switch.device
    assert isinstance(device, Watched)
    device.failures["copy_out"] = 1
    with pytest.raises(Broken):
        frozen.switch.suspend(boundary=7)
    assert frozen.round_trip() == 0
    assert frozen.round_trip() == ALL_BYTES


def test_another_layout_is_copied_whole(frozen: Frozen) -> None:
    frozen.round_trip()
    extra = torch.ones(2 * MIB, dtype=torch.uint8)
    frozen.tensors.append(extra)
    frozen.switch.device._own.add(extra.untyped_storage()._cdata)  # type: ignore[attr-defined]
    assert frozen.round_trip() == 0


def test_the_lower_half_of_xxh3_128_is_xxh3_64() -> None:
    data = bytes(np.random.default_rng(0).integers(0, 256, 3 * 4096, np.uint8))
    for nbytes in (layout.SMALL_ALIGN_BYTES, 4096, 8192, 12288):
        assert xxh3_128_intdigest(data[:nbytes]) & (2**64 - 1) == xxh3_64_intdigest(data[:nbytes])


def test_copies_and_the_format_have_the_same_chunks() -> None:
    assert copies.CHUNK_BYTES == layout.CHUNK_BYTES
