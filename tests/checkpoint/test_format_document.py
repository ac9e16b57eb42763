"""docs/snapshot-format.md suffices: a reader written from it alone, without a line of gpuslice, agrees."""

from __future__ import annotations

import itertools
import json
import re
import struct
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from gpuslice.checkpoint.format import safetensors_header, tree
from gpuslice.checkpoint.format.layout import Layout, StorageSpec, TensorSpec
from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.slots import pieces_of

MIB = 1 << 20


def up(x: int, n: int) -> int:
    return -(-x // n) * n


class Reader:
    """Sections 1 to 7 of the document."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        payload = 8 + struct.unpack("<Q", data[:8])[0]
        position = int(data[60:80])
        self.record = record = data[position : position + 4096]
        assert record[:8] == bytes.fromhex("47534E500D0A1A0A")
        assert struct.unpack_from("<Q", record, 4088)[0] == xxh3_64_intdigest(record[:4088])
        version, flags, self.generation, self.boundary = struct.unpack_from("<IIQQ", record, 8)
        self.slot, self.rank, self.storages, chunks = struct.unpack_from("<IIQQ", record, 32)
        places = struct.unpack_from("<6Q", record, 56)
        assert (version, flags, places[0], places[4], places[5]) == (2, 1, payload, position, len(data))
        _, tail, length, table, _, _ = places
        assert table == up(tail + length, 8)
        assert position == up(table + 8 * chunks, 4096)
        for at, part in [(104, data[:payload]), (120, data[tail:table]), (136, data[table:position])]:
            assert record[at : at + 16] == xxh3_128_digest(part)
        self.job = record[160:224].rstrip(b"\0").decode()
        self.metadata = json.loads(data[tail : tail + length])
        self.digests = struct.unpack_from(f"<{chunks}Q", data, table)
        self.payload, self.tail, self.chunks, self.position = payload, tail, chunks, position

    def offsets(self) -> list[int]:
        sizes = [row[1] for row in self.metadata["storages"]]
        found, at = {}, self.payload
        for step, wanted in ((4096, lambda n: n >= MIB), (256, lambda n: n < MIB)):
            for sid, nbytes in enumerate(sizes):
                if wanted(nbytes):
                    found[sid] = at
                    at += up(nbytes, step)
        assert up(at, 4096) == self.tail
        return [found[sid] for sid in range(len(sizes))]

    def check_payload(self) -> None:
        rows = self.metadata["storages"]
        assert len(rows) == self.storages
        starts = sorted(offset for offset, nbytes, _, _ in rows if nbytes)
        digests = [
            xxh3_64_intdigest(self.data[at : min(at + 4 * MIB, end)])
            for start, end in itertools.pairwise([*starts, self.tail])
            for at in range(start, end, 4 * MIB)
        ]
        assert self.digests == tuple(digests)

    def header(self, *, one_entry: bool = False) -> str:
        entries = []

        def entry(name: str, kind: str, shape: list[int], begin: int, end: int) -> None:
            offsets = [begin - self.payload, end - self.payload]
            value = {"dtype": kind, "shape": shape, "data_offsets": offsets}
            entries.append(f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}")

        names = self.names()
        at, pads = self.payload, 0
        ordered = sorted((row[0], row[1], sid) for sid, row in enumerate(self.metadata["storages"]))
        if one_entry:
            entry("__gsnp.storages", "U8", [self.tail - at], at, self.tail)
            at, ordered = self.tail, []
        for offset, nbytes, sid in [*ordered, (self.tail, 0, -1)]:
            if offset > at:
                entry(f"__gsnp.pad.{pads}", "U8", [offset - at], at, offset)
                pads += 1
            at = offset + nbytes
            if sid >= 0:
                name, kind, shape = names.get(sid, (f"__gsnp.storage.{sid}", "U8", [nbytes]))
                entry(name, kind, shape, offset, at)
        end = self.position + 4096
        entry("__gsnp.tail", "U8", [end - self.tail], self.tail, end)
        if len(self.data) > end:
            entry("__gsnp.slack", "U8", [len(self.data) - end], end, len(self.data))
        metadata = f'{{"format":"pt","gsnp":"2","record":"{self.position:020d}"}}'
        return ",".join([f'{{"__metadata__":{metadata}', *entries]) + "}"

    def names(self) -> dict[int, tuple[str, str, list[int]]]:
        types = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "int64": ("I64", 8), "complex64": (None, 8)}
        found: dict[int, tuple[str, str, list[int]]] = {}
        for path, sid, dtype, shape, stride, offset in self.metadata["tensors"]:
            kind, nbytes = types[dtype]
            count, row_major = 1, True
            for size, step in zip(shape[::-1], stride[::-1], strict=True):
                row_major &= size == 1 or step == count
                count *= size
            whole = count * nbytes == self.metadata["storages"][sid][1]
            fresh = sid not in found and path not in {name for name, _, _ in found.values()}
            if kind and fresh and row_major and whole and offset == 0 and not path.startswith("__"):
                found[sid] = (path, kind, shape)
        return found


TENSORS = [
    TensorSpec("tie", 0, "float32", (1025, 1280), (1, 1025)),
    TensorSpec('wéird "name"\x01', 0, "float32", (1025, 1, 1280), (1280, 7, 1)),
    TensorSpec("__hidden", 1, "bfloat16", (50,), (1,)),
    TensorSpec("same", 2, "float32", (0, 3), (3, 1)),
    TensorSpec("same", 3, "int64", (MIB // 8,), (1,)),
    TensorSpec("complex", 4, "complex64", (32,), (1,)),
]
SIZES = (1025 * 1280 * 4, 100, 0, MIB, 256, MIB - 1)


def test_a_reader_written_from_the_document_agrees(disk: RamDisk) -> None:
    layout = Layout(tuple(StorageSpec(n, "cuda:1", f"s{i}\n") for i, n in enumerate(SIZES)))
    with disk.open_store("document", 4) as store:
        store.begin(layout).abort()
        with store.begin(layout) as writer:
            for sid, nbytes in enumerate(SIZES):
                writer.view(sid)[:] = bytes([65 + sid]) * nbytes
            path = writer.publish(tree.encode((1, -0.0)), TENSORS, boundary=9, restartable=True).path
        data = path.read_bytes()
    reader = Reader(data)
    assert (reader.generation, reader.boundary, reader.slot, reader.rank) == (1, 9, 0, 4)
    assert reader.job == "document"
    assert [row[0] for row in reader.metadata["storages"]] == reader.offsets()
    for sid, (offset, nbytes, device, label) in enumerate(reader.metadata["storages"]):
        assert data[offset : offset + nbytes] == bytes([65 + sid]) * SIZES[sid]
        assert (device, label) == ("cuda:1", f"s{sid}\n")
    reader.check_payload()
    assert data[8 : reader.payload].decode().rstrip(" ") == reader.header()
    assert reader.metadata["tree"] == ["tuple", 1, ["float", "-0x0.0p+0"]]
    assert [tuple(row[:3]) for row in reader.metadata["tensors"]] == [
        (tensor.path, tensor.sid, tensor.dtype) for tensor in TENSORS
    ]


def test_storages_that_a_header_has_no_room_for_are_as_documented(
    disk: RamDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_header, "HEADER_LIMIT_BYTES", 8192)
    layout = Layout((StorageSpec(16),) * 200)
    tensors = [TensorSpec(f"t[{sid}]", sid, "int64", (2,), (1,)) for sid in range(200)]
    with disk.open_store("many") as store:
        with store.begin(layout) as writer:
            writer.view(199)[:] = bytes(range(16))
            path = writer.publish(tree.encode(None), tensors, boundary=1, restartable=True).path
        data = path.read_bytes()
        with open_snapshot(path) as snapshot:
            assert bytes(snapshot.view(199)) == bytes(range(16))
    reader = Reader(data)
    assert reader.payload == 4096
    assert data[8 : reader.payload].decode().rstrip(" ") == reader.header(one_entry=True)
    reader.check_payload()


def put_together(slot: Path) -> bytes:
    """Section 9: the whole file of a slot whose payload lies in pieces."""
    rest = slot.read_bytes()
    trailer = rest[-4096:]
    assert trailer[:8] == bytes.fromhex("47534E506375740A")
    assert struct.unpack_from("<Q", trailer, 4088)[0] == xxh3_64_intdigest(trailer[:4088])
    cut, count = struct.unpack_from("<QQ", trailer, 8)
    end = len(rest) - 4096 - up(16 * count, 4096)
    keys = rest[end : end + 16 * count]
    assert trailer[24:40] == xxh3_128_digest(keys)
    payload = 8 + struct.unpack("<Q", rest[:8])[0]
    names = [keys[at : at + 16].hex() for at in range(0, len(keys), 16)]
    pieces = b"".join((slot.parent / f"{slot.stem}.{name}").read_bytes() for name in names)
    assert len(pieces) == cut
    return rest[:payload] + pieces + rest[payload:end]


def test_a_slot_in_pieces_is_put_together_as_the_document_says(disk: RamDisk) -> None:
    layout = Layout(tuple(StorageSpec(n, "cpu", f"s{i}") for i, n in enumerate(SIZES)))
    with disk.open_store("document", 1, ranks=range(2)) as store:
        with store.begin(layout, share=True) as writer:
            for sid, nbytes in enumerate(SIZES):
                writer.view(sid)[:] = bytes([65 + sid]) * nbytes
            snapshot = writer.publish(tree.encode(None), TENSORS, boundary=9, restartable=True)
        data = put_together(snapshot.path)
        assert data == snapshot.arena
        sizes = sorted({path.stat().st_size for path in pieces_of(snapshot.path)})
        assert sizes == [4096, 64 << 10, MIB, up(1025 * 1280 * 4 - 4 * MIB, 4096), 4 * MIB]
    reader = Reader(data)
    assert [row[0] for row in reader.metadata["storages"]] == reader.offsets()
    reader.check_payload()
    assert data[8 : reader.payload].decode().rstrip(" ") == reader.header()


def test_the_document_knows_every_dtype_and_tag() -> None:
    from gpuslice.checkpoint.format.dtypes import DTYPES

    text = (Path(__file__).parents[2] / "docs" / "snapshot-format.md").read_text(encoding="utf-8")
    ranges = {"int1 … int7": "int", "uint1 … uint7": "uint"}
    assert all(name in text for name in ranges)
    for name, dtype in DTYPES.items():
        shown = f"{name} ({dtype.safetensors})" if dtype.safetensors else name
        assert shown in text or re.fullmatch(r"u?int[1-7]", name), name
    for tag in (*tree._BUILDERS, "tensor"):
        assert f'["{tag}"' in text, tag
