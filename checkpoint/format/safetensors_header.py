"""The safetensors header, which makes a snapshot readable by any safetensors library.

Every byte after the header belongs to exactly one entry, as safetensors demands. A storage has the name of
the tensor that covers it; paddings, the tail and the unused rest are plain bytes.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import msgspec

from gpuslice.config import format_size
from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError, UsageError

from .checksums import Digests, fingerprint, pack_digests
from .dtypes import DTYPES
from .gsnp import (
    ENTRIES_LIMIT,
    HEADER_LIMIT_BYTES,
    OTHER_VERSION,
    RECORD_BYTES,
    VERSION,
    Metadata,
    Record,
    StorageRow,
    check_tensors,
    metadata_limit_bytes,
)
from .layout import PAGE_BYTES, Layout, Placement, TensorSpec, align, place

_PREFIX = b'{"__metadata__":{"format":"pt","gsnp":"%d","record":"'
_POSITION_DIGITS = 20
#: Bytes that a reader needs to find the record: length, prefix, position of the record.
PREAMBLE_BYTES = 8 + len(_PREFIX % VERSION) + _POSITION_DIGITS
#: Prefix of the names of entries that are no tensors. Tensors whose path begins with it get no name.
_RESERVED = "__"
#: Every entry is longer than this. A header with less room per storage has one entry for all storages.
_LEAST_ENTRY_BYTES = 48


@dataclass(frozen=True)
class Content:
    """The checked content of a snapshot, and the parts of its description that follow from it.

    ``payload`` is the position of the first storage, ``rows`` are the storages as the metadata lists them,
    and ``entries`` the header's entries for storages and the paddings between them.
    """

    layout: Layout
    payload: int
    tensors: tuple[TensorSpec, ...]
    placement: Placement
    rows: tuple[StorageRow, ...]
    entries: str

    @classmethod
    def build(cls, layout: Layout, payload: int, tensors: Sequence[TensorSpec]) -> Content:
        """Check storages and tensors, and describe them. ``UsageError`` names a tensor that does not fit."""
        problem = check_tensors(tensors, layout.sizes)
        if problem:
            raise UsageError(problem, "describe tensors as torch does: shape, stride and offset in elements")
        placement = place(layout.sizes, payload)
        storages = zip(placement.offsets, layout.storages, strict=True)
        rows = tuple(StorageRow(offset, one.nbytes, one.device, one.label) for offset, one in storages)
        if payload < _LEAST_ENTRY_BYTES * len(layout.storages):
            entries = _one_entry(placement, payload)
        else:
            entries = _entries(layout, placement, payload, _owners(tensors, layout.sizes))
        return cls(layout, payload, tuple(tensors), placement, rows, entries)

    def complete(
        self, record: Record, tree: bytes, digests: Digests, extend: Callable[[int], int]
    ) -> tuple[Record, bytes, bytes]:
        """Return the completed record, the header, and the tail with the record.

        Parameters
        ----------
        record
            The record with `payload`, and with what only the caller knows.
        extend
            Makes room for a file of at least so many bytes; returns its length.

        Raises
        ------
        UsageError
            If the tree is too large.
        """
        metadata = Metadata(self.rows, self.tensors, msgspec.Raw(tree)).encode()
        limit_bytes = metadata_limit_bytes(len(self.rows))
        if len(metadata) > limit_bytes:
            raise UsageError(
                f"what is not a tensor takes {format_size(len(metadata))}, more than a snapshot can describe",
                f"keep it below {format_size(limit_bytes)}; save large data as tensors",
            )
        tail, table = self.placement.end, align(self.placement.end + len(metadata), 8)
        position = align(table + 8 * len(digests), PAGE_BYTES)
        metadata_len, metadata = len(metadata), metadata.ljust(table - tail, b"\0")
        checksums = pack_digests(digests).ljust(position - table, b"\0")
        record = replace(
            record,
            storages=len(self.rows),
            chunks=self.placement.chunk_total,
            tail=tail,
            metadata_len=metadata_len,
            table=table,
            position=position,
            file_len=extend(position + RECORD_BYTES),
            metadata_xxh3=fingerprint(metadata),
            table_xxh3=fingerprint(checksums),
            created_ns=time.time_ns(),
        )
        header = self.header(record)
        record = replace(record, header_xxh3=fingerprint(header))
        return record, header, metadata + checksums + record.encode()

    def header(self, record: Record) -> bytes:
        """Return the header, ``payload`` bytes long with its length field.

        A storage that one row-major tensor covers has that tensor's name, type and shape; any other is plain
        bytes. If the names do not fit, all storages are plain bytes. If those entries do not fit either, one
        entry stands for all storages.
        """
        text = self._render(record, self.entries)
        if 8 + len(text) > self.payload:
            text = self._render(record, _entries(self.layout, self.placement, self.payload, {}))
        if 8 + len(text) > self.payload:
            text = self._render(record, _one_entry(self.placement, self.payload))
        return struct.pack("<Q", self.payload - 8) + text.ljust(self.payload - 8)

    def _render(self, record: Record, entries: str) -> bytes:
        prefix = _prefix(record).decode() + '"}'
        end = record.position + RECORD_BYTES
        rest = {"__gsnp.tail": _entry(record.tail - self.payload, end - self.payload)}
        if record.file_len > end:
            rest["__gsnp.slack"] = _entry(end - self.payload, record.file_len - self.payload)
        return (",".join(filter(None, (prefix, entries, _text(rest)))) + "}").encode()


def header_room(layout: Layout) -> int:
    """Return how many bytes to reserve for the header, a multiple of the page size.

    The form without names always fits, and so does the form with names of usual length. If 64 MiB cannot list
    all storages, the header has one entry for all.

    Raises
    ------
    UsageError
        If there are more storages than a snapshot can have.
    """
    count = len(layout.storages)
    if count > ENTRIES_LIMIT:
        raise UsageError(f"a snapshot cannot hold {count} storages", "let tensors share storages")
    room = align(PREAMBLE_BYTES + 1024 + 512 * count, PAGE_BYTES)
    return room if room <= HEADER_LIMIT_BYTES else PAGE_BYTES


def _owners(tensors: Sequence[TensorSpec], sizes: Sequence[int]) -> dict[int, TensorSpec]:
    """Return for each storage the first tensor that may give the storage its name."""
    owners: dict[int, TensorSpec] = {}
    names: set[str] = set()
    for tensor in tensors:
        if (
            tensor.sid not in owners
            and tensor.path not in names
            and not tensor.path.startswith(_RESERVED)
            and DTYPES[tensor.dtype].safetensors
            and covers(tensor, sizes[tensor.sid])
        ):
            owners[tensor.sid] = tensor
            names.add(tensor.path)
    return owners


def covers(tensor: TensorSpec, nbytes: int) -> bool:
    """Return True if ``tensor`` is all of its storage of ``nbytes`` bytes, in row-major order."""
    elements = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size != 1 and step != elements:
            return False
        elements *= size
    return not tensor.offset and elements * DTYPES[tensor.dtype].nbytes == nbytes


def _entries(layout: Layout, placement: Placement, payload: int, owners: Mapping[int, TensorSpec]) -> str:
    """Return the entries of storages and the paddings between them, in the order of the file."""
    entries: dict[str, object] = {}
    at, pads = 0, count()
    for offset, nbytes, sid in sorted(zip(placement.offsets, layout.sizes, count(), strict=False)):
        begin = offset - payload
        if begin > at:
            entries[f"__gsnp.pad.{next(pads)}"] = _entry(at, begin)
        at, owner = begin + nbytes, owners.get(sid)
        name = owner.path if owner else f"__gsnp.storage.{sid}"
        entries[name] = _entry(begin, at, owner)
    if placement.end - payload > at:
        entries[f"__gsnp.pad.{next(pads)}"] = _entry(at, placement.end - payload)
    return _text(entries)


def _one_entry(placement: Placement, payload: int) -> str:
    """Return the header's single entry for all storages and paddings, used if separate ones do not fit."""
    return _text({"__gsnp.storages": _entry(0, placement.end - payload)})


def _entry(begin: int, end: int, owner: TensorSpec | None = None) -> dict[str, object]:
    """Return the entry of a tensor, or of plain bytes."""
    dtype, shape = (DTYPES[owner.dtype].safetensors, owner.shape) if owner else ("U8", (end - begin,))
    return {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}


def _text(entries: Mapping[str, object]) -> str:
    """Return entries as JSON without the braces around them."""
    return json.dumps(entries, separators=(",", ":"))[1:-1]


def _prefix(record: Record) -> bytes:
    return _PREFIX % VERSION + b"%0*d" % (_POSITION_DIGITS, record.position)


def decode_preamble(data: bytes) -> tuple[int, int]:
    """Return where a file's payload and record begin, from its first ``PREAMBLE_BYTES``.

    ``CorruptSnapshotError`` if this is no GSNP file, ``RefusedSnapshotError`` if it has another version.
    """
    mark = _PREFIX % VERSION
    head, _, _ = mark.partition(str(VERSION).encode())
    text = data[8 : 8 + len(mark)]
    if len(data) != PREAMBLE_BYTES or not text.startswith(head):
        raise CorruptSnapshotError("this is not a whole GSNP snapshot: its header is missing or torn")
    if text != mark:
        raise RefusedSnapshotError("this snapshot has another version", OTHER_VERSION)
    payload = 8 + int.from_bytes(data[:8], "little")
    digits = data[8 + len(mark) :]
    if not digits.isdigit() or payload > HEADER_LIMIT_BYTES or payload % PAGE_BYTES:
        raise CorruptSnapshotError("the header's length or the position of the record is absurd")
    return payload, int(digits)
