"""The safetensors header: what makes a snapshot readable by any safetensors library.

Every byte of the file after the header belongs to exactly one entry, as safetensors demands: storages
by the name of the tensor that covers them, paddings, the tail and the unused rest as plain bytes.
"""

from __future__ import annotations

import functools
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, count, repeat
from operator import attrgetter, eq, not_

import msgspec
import numpy as np

from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError, UsageError

from .dtypes import DTYPES
from .gsnp import HEADER_LIMIT_BYTES, OTHER_VERSION, RECORD_BYTES, VERSION, Record, StorageRow, check_tensors
from .layout import PAGE_BYTES, Layout, Placement, TensorSpec, align, columns, place

_PREFIX = b'{"__metadata__":{"format":"pt","gsnp":"%d","record":"'
_POSITION_DIGITS = 20
#: Bytes a reader needs to find the record: length, prefix, position of the record.
PREAMBLE_BYTES = 8 + len(_PREFIX % VERSION) + _POSITION_DIGITS
#: Begins the names of the entries that are no tensors; tensors whose path begins like this go unnamed.
_RESERVED = "__"
#: What safetensors' header has as ``\\uxxxx``, and msgspec as it is.
_BEYOND_ASCII = re.compile(r"[^ -~]")


class _Entry(msgspec.Struct, gc=False):
    """An entry of the header under its name."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


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
        devices, labels = (map(attrgetter(name), layout.storages) for name in ("device", "label"))
        rows = tuple(map(StorageRow, placement.offsets, layout.sizes, devices, labels))
        entries = _entries(layout, placement, payload, _owners(tensors, layout))
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
            text = self._render(record, _entries(self.layout, self.placement, self.payload, {}))
        return struct.pack("<Q", self.payload - 8) + text.ljust(self.payload - 8)

    def _render(self, record: Record, entries: str) -> bytes:
        prefix = _prefix(record).decode() + '"}'
        end = record.position + RECORD_BYTES
        rest = {"__gsnp.tail": _bytes_entry(record.tail - self.payload, end - self.payload)}
        if record.file_len > end:
            rest["__gsnp.slack"] = _bytes_entry(end - self.payload, record.file_len - self.payload)
        return (",".join(filter(None, (prefix, entries, _text(rest)))) + "}").encode()


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
    able = list(compress(tensors, _may_name(tensors, layout.sizes)))
    # The first ones stay: they are put in last.
    owners = {tensor.sid: tensor for tensor in reversed(able)}
    if len({tensor.path for tensor in able}) == len(able):
        return owners
    owners, names = {}, set[str]()
    for tensor in able:
        if tensor.sid not in owners and tensor.path not in names:
            owners[tensor.sid] = tensor
            names.add(tensor.path)
    return owners


def _may_name(tensors: Sequence[TensorSpec], sizes: Sequence[int]) -> list[bool]:
    """Of each tensor whether it covers its storage and is of a type and a path that safetensors may have."""
    paths, sids, dtypes, shapes, strides, offsets = columns(tensors)
    able = {name for name, kind in DTYPES.items() if kind.safetensors}
    reasons = (
        map(able.__contains__, dtypes),
        map(not_, offsets),
        map(eq, map(_dense_bytes, dtypes, shapes, strides), map(sizes.__getitem__, sids)),
        map(not_, map(str.startswith, paths, repeat(_RESERVED))),
    )
    return list(map(all, zip(*reasons, strict=True)))


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


def _entries(layout: Layout, placement: Placement, payload: int, owners: Mapping[int, TensorSpec]) -> str:
    """Storages and the paddings between them, in the order of the file."""
    starts, sizes = np.array(placement.offsets, np.int64) - payload, np.array(layout.sizes, np.int64)
    order = np.lexsort((sizes, starts))
    begins, ends = starts[order].tolist(), (starts + sizes)[order].tolist()
    sids, pad = order.tolist(), count()
    storages = [
        (owner.path, _Entry(DTYPES[owner.dtype].safetensors or "", owner.shape, (begin, end)))
        if owner
        else (f"__gsnp.storage.{sid}", _bytes_entry(begin, end))
        for sid, owner, begin, end in zip(sids, map(owners.get, sids), begins, ends, strict=True)
    ]
    pads = [
        (f"__gsnp.pad.{next(pad)}", _bytes_entry(end, begin)) if begin > end else None
        for end, begin in zip(ends, [*begins[1:], placement.end - payload], strict=False)
    ]
    return _text(dict(filter(None, chain.from_iterable(zip(storages, pads, strict=True)))))


def _bytes_entry(begin: int, end: int) -> _Entry:
    return _Entry("U8", (end - begin,), (begin, end))


def _text(entries: Mapping[str, _Entry]) -> str:
    """Entries without the braces around them."""
    text = msgspec.json.encode(entries)[1:-1].decode()
    if text.isascii() and "\x7f" not in text:
        return text
    return _BEYOND_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)


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
        raise RefusedSnapshotError("this snapshot has another version", OTHER_VERSION)
    payload = 8 + int.from_bytes(data[:8], "little")
    digits = data[8 + len(mark) :]
    if not digits.isdigit() or payload > HEADER_LIMIT_BYTES or payload % PAGE_BYTES:
        raise CorruptSnapshotError("the header's length or the position of the record is absurd")
    return payload, int(digits)
