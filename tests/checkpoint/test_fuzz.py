"""Every damaged byte and every truncation is found; no file makes the reader do anything but refuse."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuslice.checkpoint.format import tree
from gpuslice.checkpoint.format.checksums import fingerprint
from gpuslice.checkpoint.format.gsnp import RECORD_BYTES, Record
from gpuslice.checkpoint.format.layout import align
from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError

fuzz = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

Change = Callable[[dict[str, list[list[object]]]], object]

#: Name of each byte class -> its range in the file.
Regions = dict[str, tuple[int, int]]


def regions(record: Record, header: int) -> Regions:
    table_end = record.table + 8 * record.chunks
    return {
        "length": (0, 8),
        "header": (8, 8 + header),
        "header padding": (8 + header, record.payload),
        "first storage": (record.payload, record.payload + (5 << 20)),
        "payload": (record.payload, record.tail),
        "small storages": (record.tail - 8192, record.tail),
        "metadata": (record.tail, record.tail + record.metadata_len),
        "checksum table": (record.table, table_end),
        "table padding": (table_end, record.position),
        "record": (record.position, record.position + 256),
        "record padding": (record.position + 256, record.position + RECORD_BYTES - 8),
        "record checksum": (record.position + RECORD_BYTES - 8, record.position + RECORD_BYTES),
    }


class Victim:
    """A whole snapshot file, damaged for a moment at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path.read_bytes()
        with open_snapshot(path) as snapshot:
            self.record = snapshot.record
        self.regions = regions(self.record, len(self.data[8 : self.record.payload].rstrip()))

    @contextlib.contextmanager
    def patched(self, position: int, data: bytes) -> Iterator[None]:
        with self.path.open("r+b", buffering=0) as file:
            file.seek(position)
            file.write(data)
            try:
                yield
            finally:
                file.seek(position)
                file.write(self.data[position : position + len(data)])

    def check(self) -> None:
        """What a restore does: open, decode, look at every byte."""
        with open_snapshot(self.path) as snapshot:
            snapshot.verify()
            tree.decode(snapshot.tree)
            for sid in range(len(snapshot.storages)):
                snapshot.view(sid)


@pytest.fixture
def victim(snapshot_path: Path) -> Victim:
    return Victim(snapshot_path)


REGIONS = list(regions(Record(generation=1, slot=0, rank=0, payload=0), 0))


@pytest.mark.parametrize("region", REGIONS)
@settings(fuzz, max_examples=60)
@given(data=st.data())
def test_every_damaged_byte_is_found(victim: Victim, region: str, data: st.DataObject) -> None:
    start, stop = victim.regions[region]
    position = data.draw(st.integers(start, stop - 1), label="position")
    flip = data.draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 255]), label="flip")
    with (
        victim.patched(position, bytes([victim.data[position] ^ flip])),
        pytest.raises((CorruptSnapshotError, RefusedSnapshotError)),
    ):
        victim.check()


@fuzz
@given(data=st.data())
def test_every_overwritten_range_is_found(victim: Victim, data: st.DataObject) -> None:
    start, stop = victim.regions[data.draw(st.sampled_from(REGIONS), label="region")]
    position = data.draw(st.integers(start, stop - 1), label="position")
    junk = data.draw(st.binary(min_size=1, max_size=64), label="junk")
    inside = junk[: victim.record.position + RECORD_BYTES - position]  # what follows belongs to no snapshot
    if victim.data[position : position + len(inside)] == inside:
        return
    with victim.patched(position, junk), pytest.raises((CorruptSnapshotError, RefusedSnapshotError)):
        victim.check()


@pytest.mark.slow
@fuzz
@given(data=st.data())
def test_every_truncation_is_found(victim: Victim, data: st.DataObject) -> None:
    edges = [edge for region in victim.regions.values() for edge in region] + [len(victim.data)]
    near = st.sampled_from(edges).flatmap(lambda edge: st.integers(edge - 2, edge + 2))
    length = data.draw(near | st.integers(0, len(victim.data) - 1), label="length")
    if not 0 <= length < len(victim.data):
        return
    with victim.path.open("r+b", buffering=0) as file:
        file.truncate(length)
        try:
            with pytest.raises(CorruptSnapshotError):
                victim.check()
        finally:
            file.seek(length)
            file.write(victim.data[length:])


def test_a_longer_file_is_found(victim: Victim) -> None:
    with victim.path.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CorruptSnapshotError):
        victim.check()


@fuzz
@given(
    data=st.binary(max_size=300) | st.integers(0, 2**64 - 1).map(lambda n: struct.pack("<Q", n) + b"{" * 99)
)
def test_junk_is_refused(shm: Path, data: bytes) -> None:
    path = shm / "junk"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises((CorruptSnapshotError, RefusedSnapshotError)):
        open_snapshot(path)


@fuzz
@given(data=st.data())
def test_absurd_numbers_in_a_record_with_the_right_checksum_are_refused(
    victim: Victim, data: st.DataObject
) -> None:
    fields = ["storages", "chunks", "payload", "tail", "metadata_len", "table", "position", "file_len"]
    field = data.draw(st.sampled_from(fields), label="field")
    value = data.draw(st.integers(0, 2**64 - 1) | st.integers(0, 2**24), label="value")
    if value == getattr(victim.record, field):
        return
    forged = replace(victim.record, **{field: value}).encode()
    with victim.patched(victim.record.position, forged), pytest.raises(CorruptSnapshotError):
        victim.check()


def forge(victim: Victim, change: Change) -> None:
    """Write the file again with changed metadata, and every position and checksum right."""
    record = victim.record
    metadata = json.loads(victim.data[record.tail : record.tail + record.metadata_len])
    change(metadata)
    text = json.dumps(metadata, separators=(",", ":")).encode()
    start = align(record.tail + len(text), 8)
    padded = text.ljust(start - record.tail, b"\0")
    digests = victim.data[record.table :][: 8 * record.chunks]
    table = digests.ljust(record.position - start, b"\0")
    forged = replace(
        record,
        metadata_len=len(text),
        table=start,
        metadata_xxh3=fingerprint(padded),
        table_xxh3=fingerprint(table),
    )
    with victim.path.open("r+b") as file:
        file.seek(record.tail)
        file.write(padded + table + forged.encode())


def test_the_forger_can_succeed(victim: Victim) -> None:
    forge(victim, lambda metadata: None)
    victim.check()


def _swap_offsets(metadata: dict[str, list[list[object]]]) -> None:
    rows = metadata["storages"]
    rows[2][0], rows[4][0] = rows[4][0], rows[2][0]


def _set(part: str, row: int, column: int, value: object) -> Change:
    def change(metadata: dict[str, list[list[object]]]) -> None:
        metadata[part][row][column] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _swap_offsets,
        _set("storages", 0, 0, 0),
        _set("storages", 0, 0, -4096),
        _set("storages", 2, 0, 2**40),
        _set("storages", 2, 0, 1),
        _set("storages", 2, 1, 99),
        _set("storages", 2, 1, -1),
        _set("storages", 2, 1, 2**62),
        _set("storages", 2, 1, 2**70),
        _set("tensors", 0, 1, 9),
        _set("tensors", 0, 1, -1),
        _set("tensors", 0, 2, "int7x"),
        _set("tensors", 0, 2, "float64"),
        _set("tensors", 0, 5, 2**62),
        _set("tensors", 0, 5, -1),
        _set("tensors", 0, 3, [2**61]),
        _set("tensors", 2, 4, [-1]),
        _set("tensors", 2, 3, [1] * 3),
        _set("tensors", 2, 0, "../../../"),
        lambda metadata: metadata["storages"].pop(),
        lambda metadata: metadata["tensors"].clear(),
        lambda metadata: metadata["tensors"][0].pop(),
        lambda metadata: metadata.pop("tree"),
    ],
)
def test_a_forged_description_is_refused(victim: Victim, change: Change) -> None:
    forge(victim, change)
    with pytest.raises(CorruptSnapshotError):
        victim.check()


def test_a_header_that_tells_safetensors_something_else_is_refused(victim: Victim) -> None:
    header = bytearray(victim.data[: victim.record.payload])
    position = header.index(b'"moment"')
    header[position : position + 8] = b'"mOment"'
    forged = replace(victim.record, header_xxh3=fingerprint(bytes(header)))
    with victim.path.open("r+b") as file:
        file.write(header)
        file.seek(victim.record.position)
        file.write(forged.encode())
    with pytest.raises(CorruptSnapshotError, match="header does not describe"):
        victim.check()


def test_a_swapped_table_is_refused(victim: Victim) -> None:
    record = victim.record
    table = bytearray(victim.data[record.table : record.position])
    table[0:8], table[8:16] = table[8:16], table[0:8]
    forged = replace(record, table_xxh3=fingerprint(bytes(table)))
    with victim.path.open("r+b") as file:
        file.seek(record.table)
        file.write(table)
        file.seek(record.position)
        file.write(forged.encode())
    with pytest.raises(CorruptSnapshotError, match="storage 0 "):
        victim.check()
