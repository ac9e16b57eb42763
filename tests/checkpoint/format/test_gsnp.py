"""GSNP/2: stock safetensors reads it, placement is right by construction, every part has one legal form."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from gpuslice.checkpoint.format.checksums import digest
from gpuslice.checkpoint.format.dtypes import DTYPES
from gpuslice.checkpoint.format.gsnp import (
    Metadata,
    Record,
    StorageRow,
    check_tensors,
    metadata_limit_bytes,
)
from gpuslice.checkpoint.format.layout import (
    CHUNK_BYTES,
    LARGE_BYTES,
    PAGE_BYTES,
    SMALL_ALIGN_BYTES,
    Layout,
    StorageSpec,
    TensorSpec,
    place,
)
from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.format.safetensors_header import Content, covers, header_room
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError

Pattern = Callable[[int, int, int], bytes]

RECORD = Record(
    restartable=True,
    generation=5,
    boundary=12,
    slot=1,
    rank=3,
    storages=2,
    chunks=2,
    payload=4096,
    tail=2 * 4096,
    metadata_len=100,
    table=2 * 4096 + 104,
    position=3 * 4096,
    file_len=5 * 4096,
    header_xxh3=bytes(range(16)),
    metadata_xxh3=bytes(16),
    table_xxh3=bytes(16),
    created_ns=1,
    job="night-run",
)


def test_stock_safetensors_reads_a_snapshot(snapshot_path: Path, pattern: Pattern) -> None:
    loaded = load_file(snapshot_path)
    weight = torch.frombuffer(bytearray(pattern(7, 1, 1 << 20)), dtype=torch.float64)
    assert torch.equal(loaded["moment"].view(torch.int64).flatten(), weight.view(torch.int64))
    assert loaded["moment"].shape == (128, 1024)
    assert loaded["model.bias"].dtype is torch.bfloat16
    assert loaded["empty"].shape == (0, 7)
    # The first storage is four bytes longer than its tensors, and complex64 is not in every safetensors.
    assert loaded["__gsnp.storage.0"].numpy().tobytes() == pattern(7, 0, 5 * (1 << 20) + 4)
    assert loaded["__gsnp.storage.4"].numpy().tobytes() == pattern(7, 4, 4096)
    with safetensors.safe_open(snapshot_path, "pt") as file:
        assert file.metadata()["gsnp"] == "2"


def test_storages_lie_on_pages_of_the_file(snapshot_path: Path) -> None:
    with open_snapshot(snapshot_path) as snapshot:
        data = snapshot_path.read_bytes()
        for sid, (storage, offset) in enumerate(zip(snapshot.storages, snapshot.offsets, strict=True)):
            assert offset % (PAGE_BYTES if storage.nbytes >= LARGE_BYTES else SMALL_ALIGN_BYTES) == 0
            assert data[offset : offset + storage.nbytes] == snapshot.view(sid)


def test_ties_and_views_stay_what_they_are(snapshot_path: Path) -> None:
    with open_snapshot(snapshot_path) as snapshot:
        tensors = {tensor.path: tensor for tensor in snapshot.tensors}
    assert tensors["model.tied"].sid == tensors["model.weight"].sid
    assert tensors["model.tied"].stride == (1, 1024)
    assert tensors["model.every_other"] == TensorSpec("model.every_other", 2, "int16", (25,), (2,), 0)


def test_every_dtype_of_torch_is_known() -> None:
    for name in dir(torch):
        dtype = getattr(torch, name)
        if isinstance(dtype, torch.dtype):
            known = DTYPES[str(dtype).removeprefix("torch.")]
            assert known.nbytes == dtype.itemsize, name


def test_safetensors_names_are_the_ones_it_uses(disk: RamDisk, save: Callable[..., object]) -> None:
    named = [name for name, dtype in DTYPES.items() if dtype.safetensors]
    sizes = tuple(64 for _ in named)
    tensors = tuple(
        TensorSpec(name, sid, name, (64 // DTYPES[name].nbytes,), (1,)) for sid, name in enumerate(named)
    )
    with disk.open_store(None) as store:
        path = save(store, sizes=sizes, tensors=tensors).path  # type: ignore[attr-defined]
        loaded = load_file(path)
    for name in named:
        assert loaded[name].dtype is getattr(torch, name)


@given(st.lists(st.integers(0, 3 * CHUNK_BYTES) | st.integers(LARGE_BYTES - 2, LARGE_BYTES + 2), max_size=12))
def test_placement_neither_overlaps_nor_leaves_holes(sizes: list[int]) -> None:
    placement = place(tuple(sizes), 8192)
    ranges = sorted((offset, offset + n) for offset, n in zip(placement.offsets, sizes, strict=True) if n)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
    assert all(8192 <= start <= stop <= placement.end for start, stop in ranges)
    position = 8192
    for start, stop in placement.chunks:
        assert start == position < stop <= start + CHUNK_BYTES
        position = stop
    assert position == placement.end
    assert placement.end % PAGE_BYTES == 0
    for sid, nbytes in enumerate(sizes):
        if nbytes:
            own = placement.chunks[placement.chunk_at[placement.offsets[sid]] :][: -(-nbytes // CHUNK_BYTES)]
            assert own[0][0] == placement.offsets[sid]
            assert 0 <= own[-1][1] - own[0][0] - nbytes < PAGE_BYTES + SMALL_ALIGN_BYTES


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (TensorSpec("a", 0, "float7", (1,), (1,)), "unknown dtype"),
        (TensorSpec("a", 1, "int8", (1,), (1,)), "does not exist"),
        (TensorSpec("a", -1, "int8", (1,), (1,)), "does not exist"),
        (TensorSpec("a", 0, "int8", (101,), (1,)), "reaches beyond"),
        (TensorSpec("a", 0, "int8", (2, 2), (99, 1)), "reaches beyond"),
        (TensorSpec("a", 0, "float64", (), (), 13), "reaches beyond"),
        (TensorSpec("a", 0, "float32", (26,), (1,)), "reaches beyond"),
        (TensorSpec("a", 0, "int8", (2**61,), (2**61,)), "reaches beyond"),
        (TensorSpec("a", 0, "int8", (1,), (2**62,)), "too large"),
        (TensorSpec("a", 0, "int8", (0, 2**63), (1, 1)), "too large"),
        (TensorSpec("a", 0, "int8", (0,), (1,), 2**62), "too large"),
        (TensorSpec("a", 0, "int8", (2**32, 2**32), (0, 0)), "too large"),
        (TensorSpec("a", 0, "int8", (2,), (-1,), 5), "negative"),
        (TensorSpec("a", 0, "int8", (-2,), (1,)), "negative"),
        (TensorSpec("a", 0, "int8", (1,), (1,), -1), "negative"),
        (TensorSpec("a", 0, "int8", (1,), ()), "1 dimensions and 0 strides"),
        (TensorSpec("a", 0, "int8", (1,) * 65, (1,) * 65), "65 dimensions"),
    ],
)
def test_a_tensor_must_fit_its_storage(tensor: TensorSpec, problem: str) -> None:
    assert problem in (check_tensors([tensor], [100]) or "")


@pytest.mark.parametrize(
    "tensor",
    [
        TensorSpec("a", 0, "int8", (100,), (1,)),
        TensorSpec("a", 0, "float32", (1000, 25), (0, 1)),
        TensorSpec("a", 0, "float32", (5, 5), (1, 5)),
        TensorSpec("a", 0, "float64", (), (), 11),
        TensorSpec("a", 0, "float64", (0, 10**9), (1, 1), 99),
        TensorSpec("a", 0, "int8", (1, 0, 2**61), (2**62 - 1, 2**62 - 1, 0), 2**62 - 1),
    ],
)
def test_expanded_transposed_and_empty_tensors_fit(tensor: TensorSpec) -> None:
    assert check_tensors([tensor], [100]) is None


@given(
    st.lists(st.integers(0, 4), max_size=4),
    st.permutations(range(4)),
    st.integers(0, 2),
)
def test_covering_means_the_same_bytes_in_the_same_order(
    shape: list[int], order: list[int], offset: int
) -> None:
    array = np.arange(np.prod(shape, dtype=int) + offset, dtype=np.int32)[offset:].reshape(shape)
    array = array.transpose([axis for axis in order if axis < len(shape)])
    stride = tuple(step // 4 for step in array.strides)
    tensor = TensorSpec("a", 0, "int32", array.shape, stride, offset)
    nbytes = array.nbytes
    if covers(tensor, nbytes):
        assert offset == 0
        assert array.tobytes() == np.arange(array.size, dtype=np.int32).tobytes()
    elif array.size and offset == 0:
        assert array.tobytes() != np.arange(array.size, dtype=np.int32).tobytes()


def test_names_too_long_for_the_header_give_way() -> None:
    layout = Layout((StorageSpec(8), StorageSpec(8)))
    tensors = [TensorSpec("x" * 9000, 0, "float64", (1,), (1,)), TensorSpec("y", 1, "float64", (1,), (1,))]
    content = Content.build(layout, header_room(layout), tensors)
    header = content.header(RECORD)
    assert len(header) == content.payload
    assert b"__gsnp.storage.0" in header
    assert b"__gsnp.storage.1" in header


@pytest.mark.parametrize("count", [40, 100])
def test_one_entry_stands_for_more_storages_than_the_header_has_room_for(count: int) -> None:
    """The entries of 40 storages are too long; 100 are too many to try."""
    content = Content.build(Layout((StorageSpec(16),) * count), 4096, [])
    header = content.header(RECORD)
    assert len(header) == content.payload
    entries = json.loads(header[8:])
    assert entries["__gsnp.storages"]["data_offsets"] == [0, content.placement.end - 4096]
    assert not any(name.startswith("__gsnp.storage.") for name in entries)


def test_a_million_storages_can_be_described() -> None:
    assert header_room(Layout((StorageSpec(16),) * 1_000_003)) == 4096
    assert metadata_limit_bytes(1_000_003) > 1_000_000_000


def test_the_shortest_header_always_fits() -> None:
    for count in (0, 1, 300):
        layout = Layout(tuple(StorageSpec(2**40 + i) for i in range(count)))
        content = Content.build(layout, header_room(layout), [])
        assert len(content.header(RECORD)) == content.payload


def test_a_record_comes_back() -> None:
    data = RECORD.encode()
    assert len(data) == 4096
    assert Record.decode(data) == RECORD


@given(st.integers(0, 4095), st.integers(1, 255))
def test_every_flipped_byte_of_a_record_is_noticed(position: int, flip: int) -> None:
    data = bytearray(RECORD.encode())
    data[position] ^= flip
    with pytest.raises((CorruptSnapshotError, RefusedSnapshotError)):
        Record.decode(bytes(data))


def seal(data: bytes) -> bytes:
    """Give a tampered record its right checksum."""
    return data[:-8] + struct.pack("<Q", digest(data[:-8]))


@given(st.integers(12, 4087), st.integers(1, 255))
def test_a_sealed_record_still_has_to_make_sense(position: int, flip: int) -> None:
    data = bytearray(RECORD.encode())
    data[position] ^= flip
    try:
        record = Record.decode(seal(bytes(data)))
    except (CorruptSnapshotError, RefusedSnapshotError):
        return
    assert record.encode() == seal(bytes(data))
    assert record.position + 4096 <= record.file_len


def test_another_version_is_refused() -> None:
    data = bytearray(RECORD.encode())
    data[8] = 1
    with pytest.raises(RefusedSnapshotError, match="version 1"):
        Record.decode(seal(bytes(data)))


METADATA = Metadata(
    (StorageRow(4096, 8, "cpu", "w"),),
    (TensorSpec("w", 0, "float64", (1,), (1,)),),
    msgspec.Raw(b"null"),
)


def test_metadata_comes_back() -> None:
    assert Metadata.decode(METADATA.encode()) == METADATA


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"tree":null', b'"tree": null'),
        (b'"tree":null', b'"tree":null,"tree":null'),
        (b'"tree":null', b'"tree":null,"more":1'),
        (b'{"storages"', b'{"tree":1,"storages"'),
        (b',"tree":null', b""),
        (b"4096", b"4096.0"),
        (b"4096", b"4.096e3"),
        (b'"cpu"', b'"\\u0063pu"'),
        (b'"w"]]', b'"w",1]]'),
        (b"[1]", b"[true]"),
        (b'"w"', b'"\\ud800"'),
        (b'"w"', b'"\xff"'),
        (b"null", b"[" * 100_000),
    ],
)
def test_metadata_has_one_form(old: bytes, new: bytes) -> None:
    data = METADATA.encode()
    assert old in data
    with pytest.raises(CorruptSnapshotError):
        Metadata.decode(data.replace(old, new, 1))
