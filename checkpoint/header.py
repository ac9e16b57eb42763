"""The safetensors header: what makes a snapshot readable by any safetensors library.

Every byte of the file after the header belongs to exactly one entry, as safetensors demands: storages
by the name of the tensor that covers them, paddings, the tail and the unused rest as plain bytes.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError, UsageError

from .dtypes import DTYPES
from .format import HEADER_LIMIT_BYTES, RECORD_BYTES, VERSION, Record, StorageRow, check_tensors
from .layout import PAGE_BYTES, Layout, Placement, TensorSpec, align, place

_PREFIX = b'{"__metadata__":{"format":"pt","gsnp":"%d","record":"'
_POSITION_DIGITS = 20
#: Bytes a reader needs to find the record: length, prefix, position of the record.
PREAMBLE_BYTES = 8 + len(_PREFIX % VERSION) + _POSITION_DIGITS
#: Begins the names of the entries that are no tensors; tensors whose path begins like this go unnamed.
_RESERVED = "__"
#: ``json.dumps`` without asking for its options each time.
_quoted = json.JSONEncoder().encode


@dataclass(frozen=True)
class Content:
    """What a snapshot holds, checked, with the parts of its description that follow from that alone.

    Attributes
    ----------
    layout, payload, tensors
        The storages, where the first one lies, the tensors over them.
    placement
        Where each storage lies.
    rows
        The storages as the metadata lists them.
    entries
        The header's entries for storages and the paddings between them.
    """

    layout: Layout
    payload: int
    tensors: tuple[TensorSpec, ...]
    placement: Placement
    rows: tuple[StorageRow, ...]
    entries: str

    @classmethod
    def build(cls, layout: Layout, payload: int, tensors: Sequence[TensorSpec]) -> Content:
        """Check and describe.

        Raises
        ------
        UsageError
            If a tensor does not fit its storage; names it.
        """
        problem = check_tensors(tensors, layout.sizes)
        if problem:
            raise UsageError(problem, "describe tensors as torch does: shape, stride and offset in elements")
        placement = place(layout.sizes, payload)
        rows = tuple(
            StorageRow(offset, storage.nbytes, storage.device, storage.label)
            for offset, storage in zip(placement.offsets, layout.storages, strict=True)
        )
        entries = ",".join(_entries(layout, placement, payload, _owners(tensors, layout)))
        return cls(layout, payload, tuple(tensors), placement, rows, entries)

    @functools.cached_property
    def encoded(self) -> tuple[msgspec.Raw, msgspec.Raw]:
        """Storages and tensors as the metadata has them."""
        return msgspec.Raw(msgspec.json.encode(self.rows)), msgspec.Raw(msgspec.json.encode(self.tensors))

    def header(self, record: Record) -> bytes:
        """The header, ``payload`` bytes long with its length field.

        A storage that one row-major tensor covers goes by that tensor's name, type and shape, any other
        is plain bytes. If the names are too long for the room, all are plain bytes.
        """
        text = self._render(record, self.entries)
        if 8 + len(text) > self.payload:
            text = self._render(record, ",".join(_entries(self.layout, self.placement, self.payload, {})))
        return struct.pack("<Q", self.payload - 8) + text.ljust(self.payload - 8)

    def _render(self, record: Record, entries: str) -> bytes:
        prefix = _prefix(record).decode() + '"}'
        end = record.position + RECORD_BYTES
        parts = [prefix, entries, _bytes_entry("__gsnp.tail", self.payload, record.tail, end)]
        if record.file_len > end:
            parts.append(_bytes_entry("__gsnp.slack", self.payload, end, record.file_len))
        return (",".join(part for part in parts if part) + "}").encode()


def header_room(layout: Layout) -> int:
    """Bytes to leave for the header, a multiple of the page size.

    The form without names fits for certain; so does the one with names of everyday length.

    Raises
    ------
    UsageError
        If there are more storages than a header has room for.
    """
    room = align(PREAMBLE_BYTES + 1024 + 512 * len(layout.storages), PAGE_BYTES)
    if room > HEADER_LIMIT_BYTES:
        raise UsageError(
            f"a snapshot cannot hold {len(layout.storages)} storages", "let tensors share storages"
        )
    return room


def _owners(tensors: Sequence[TensorSpec], layout: Layout) -> dict[int, TensorSpec]:
    """For each storage the first tensor that may give it its name."""
    owners: dict[int, TensorSpec] = {}
    names: set[str] = set()
    for tensor in tensors:
        if (
            tensor.sid not in owners
            and DTYPES[tensor.dtype].safetensors
            and tensor.path not in names
            and not tensor.path.startswith(_RESERVED)
            and covers(tensor, layout.storages[tensor.sid].nbytes)
        ):
            owners[tensor.sid] = tensor
            names.add(tensor.path)
    return owners


def covers(tensor: TensorSpec, nbytes: int) -> bool:
    """Whether ``tensor`` is the whole of its storage of ``nbytes`` bytes, in row-major order."""
    return not tensor.offset and _dense_bytes(tensor.dtype, tensor.shape, tensor.stride) == nbytes


@functools.lru_cache(maxsize=4096)  # a model has thousands of tensors, but few shapes
def _dense_bytes(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Bytes of a tensor in row-major order; -1 if it is in another one."""
    count = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != count:
            return -1
        count *= size
    return count * DTYPES[dtype].nbytes


def _entries(
    layout: Layout, placement: Placement, payload: int, owners: dict[int, TensorSpec]
) -> Iterator[str]:
    """Storages and the paddings between them, in the order of the file."""
    position, pads = payload, 0
    by_position = sorted(zip(placement.offsets, layout.sizes, range(len(layout.sizes)), strict=True))
    for offset, nbytes, sid in by_position:
        if offset > position:
            yield _bytes_entry(f"__gsnp.pad.{pads}", payload, position, offset)
            pads += 1
        position = offset + nbytes
        owner = owners.get(sid)
        if owner is None:
            yield _bytes_entry(f"__gsnp.storage.{sid}", payload, offset, position)
        else:
            yield _tensor_entry(owner, payload, offset, position)
    if placement.end > position:
        yield _bytes_entry(f"__gsnp.pad.{pads}", payload, position, placement.end)


def _bytes_entry(name: str, payload: int, start: int, stop: int) -> str:
    return (
        f'"{name}":{{"dtype":"U8","shape":[{stop - start}],'
        f'"data_offsets":[{start - payload},{stop - payload}]}}'
    )


def _tensor_entry(tensor: TensorSpec, payload: int, start: int, stop: int) -> str:
    kind, sizes = DTYPES[tensor.dtype].safetensors, ",".join(map(str, tensor.shape))
    offsets = f"{start - payload},{stop - payload}"
    return f'{_quoted(tensor.path)}:{{"dtype":"{kind}","shape":[{sizes}],"data_offsets":[{offsets}]}}'


def preamble(record: Record) -> bytes:
    """The first ``PREAMBLE_BYTES`` of the header: without them, nothing can be read."""
    return struct.pack("<Q", record.payload - 8) + _prefix(record)


def _prefix(record: Record) -> bytes:
    return _PREFIX % VERSION + b"%0*d" % (_POSITION_DIGITS, record.position)


def decode_preamble(data: bytes) -> tuple[int, int]:
    """Where payload and record of a file begin, from its first ``PREAMBLE_BYTES``.

    Raises
    ------
    CorruptSnapshotError
        If this is not a GSNP file.
    RefusedSnapshotError
        If it is one of another version.
    """
    mark = _PREFIX % VERSION
    head, _, _ = mark.partition(str(VERSION).encode())
    text = data[8 : 8 + len(mark)]
    if len(data) != PREAMBLE_BYTES or not text.startswith(head):
        raise CorruptSnapshotError("this is not a whole GSNP snapshot: its header is missing or torn")
    if text != mark:
        raise RefusedSnapshotError("this snapshot has another version", f"this is GSNP/{VERSION}")
    payload = 8 + int.from_bytes(data[:8], "little")
    digits = data[8 + len(mark) :]
    if not digits.isdigit() or payload > HEADER_LIMIT_BYTES or payload % PAGE_BYTES:
        raise CorruptSnapshotError("the header's length or the position of the record is absurd")
    return payload, int(digits)
