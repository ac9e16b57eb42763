"""GSNP/2, the snapshot file: encode and decode its record and metadata. No input or output here.

A file is a safetensors header (safetensors_header.py), the payload (layout.py), and a tail of metadata,
checksum table and record; docs/snapshot-format.md describes every byte. Each part has exactly one legal form.
So reading means to decode, encode again and compare: a part that differs in one byte from what the writer
makes is refused, and no rule is kept in two places.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import msgspec

from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError

from .checksums import digest
from .dtypes import DTYPES
from .layout import CHUNK_BYTES, PAGE_BYTES, Layout, StorageSpec, TensorSpec, align

VERSION = 2
#: Remedy for a snapshot of another version.
OTHER_VERSION = f"this gpuslice reads GSNP/{VERSION} only: use the version that wrote it"
RECORD_BYTES = 4096
HEADER_LIMIT_BYTES = 64 << 20
#: Greatest length of the metadata: for all that is no tensor, and in addition for each storage.
TREE_LIMIT_BYTES = 64 << 20
ENTRY_LIMIT_BYTES = 1 << 10
#: Greatest number of storages, and of tensors.
ENTRIES_LIMIT = 1 << 20
DIMENSIONS_LIMIT = 64
FILE_LIMIT_BYTES = 1 << 44
#: Limit of sizes, strides, offsets and numbers of elements: torch uses signed 64-bit numbers.
_COUNT_LIMIT = 1 << 62

_MAGIC = b"GSNP\r\n\x1a\n"
_RECORD = struct.Struct("<8sIIQQIIQQQQQQQQ16s16s16sQ64s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The commit record, 4 KiB at a snapshot's end, which makes it complete. Positions are in bytes."""

    restartable: bool = False
    generation: int
    boundary: int = 0
    slot: int
    rank: int
    storages: int = 0
    chunks: int = 0
    payload: int
    tail: int = 0
    metadata_len: int = 0
    table: int = 0
    position: int = 0
    file_len: int = 0
    header_xxh3: bytes = b""
    metadata_xxh3: bytes = b""
    table_xxh3: bytes = b""
    created_ns: int = 0
    job: str = ""

    def encode(self) -> bytes:
        """Return the record's only legal form."""
        body = _RECORD.pack(_MAGIC, VERSION, *astuple(self)[:-1], self.job.encode())
        body = body.ljust(RECORD_BYTES - 8, b"\0")
        return body + struct.pack("<Q", digest(body))

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """Return the record that the bytes hold.

        ``CorruptSnapshotError`` if they hold none, ``RefusedSnapshotError`` for another version.
        """
        if len(data) != RECORD_BYTES or not data.startswith(_MAGIC):
            raise CorruptSnapshotError("the commit record is not a GSNP record")
        if data[-8:] != struct.pack("<Q", digest(data[:-8])):
            raise CorruptSnapshotError("the commit record does not match its own checksum")
        _, version, *fields = _RECORD.unpack_from(data)
        if version != VERSION:
            raise RefusedSnapshotError(f"the record has version {version}", OTHER_VERSION)
        values = dict(zip(cls.__dataclass_fields__, fields, strict=True))
        values["restartable"] = values["restartable"] == 1
        try:
            values["job"] = values["job"].rstrip(b"\0").decode()
        except UnicodeDecodeError as error:
            raise CorruptSnapshotError("the record's job name is not UTF-8") from error
        record = cls(**values)
        if record.encode() != data:
            raise CorruptSnapshotError("the commit record has bits set that mean nothing")
        record.check()
        return record

    def check(self) -> None:
        """Raise ``CorruptSnapshotError`` unless the positions follow from each other."""
        table_end = self.table + 8 * self.chunks
        problems = {
            "its parts overlap": not (
                0 < self.payload <= self.tail <= FILE_LIMIT_BYTES
                and self.payload % PAGE_BYTES == 0
                and self.tail % PAGE_BYTES == 0
                and self.table == align(self.tail + self.metadata_len, 8)
                and self.position == align(table_end, PAGE_BYTES)
                and self.position + RECORD_BYTES <= self.file_len <= FILE_LIMIT_BYTES
            ),
            "its header is too long": self.payload > HEADER_LIMIT_BYTES,
            "its metadata is too long": self.metadata_len > metadata_limit_bytes(self.storages),
            "it has too many storages": self.storages > ENTRIES_LIMIT,
            "it has too many chunks": (
                self.chunks > self.storages + (self.tail - self.payload) // CHUNK_BYTES + 1
            ),
            "it has generation 0": self.generation < 1,
        }
        for problem, found in problems.items():
            if found:
                raise CorruptSnapshotError(f"the commit record makes no sense: {problem}")


def metadata_limit_bytes(storages: int) -> int:
    """Return the greatest length of the metadata of this many storages."""
    return TREE_LIMIT_BYTES + ENTRY_LIMIT_BYTES * storages


class StorageRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A storage as the metadata lists it; its position in the list is its number."""

    offset: int
    nbytes: int
    device: str
    label: str


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the tail says about the payload; ``tree`` is the tagged JSON of ``tree.py``."""

    storages: tuple[StorageRow, ...]
    tensors: tuple[TensorSpec, ...]
    tree: msgspec.Raw

    def encode(self) -> bytes:
        """Return the metadata's only legal form."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Metadata:
        """Return the metadata. ``CorruptSnapshotError`` for bytes that `encode` would not have written."""
        try:
            metadata = _metadata_decoder.decode(data)
            canonical = metadata.encode() == data
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise CorruptSnapshotError(f"the metadata is not what GSNP/2 says: {error}") from error
        if not canonical:
            raise CorruptSnapshotError("the metadata is not in its canonical form")
        return metadata

    @property
    def layout(self) -> Layout:
        """The snapshot's storages as the writer received them."""
        return Layout(tuple(StorageSpec(row.nbytes, row.device, row.label) for row in self.storages))


_metadata_decoder = msgspec.json.Decoder(Metadata)


def check_tensors(tensors: Sequence[TensorSpec], sizes: Sequence[int]) -> str | None:
    """Return the first problem of ``tensors`` over storages of ``sizes`` bytes, or None."""
    if len(tensors) > ENTRIES_LIMIT or len(sizes) > ENTRIES_LIMIT:
        return f"more than {ENTRIES_LIMIT} tensors or storages"
    for tensor in tensors:
        problem = _tensor_problem(tensor, sizes)
        if problem:
            return f"tensor {tensor.path!r} {problem}"
    return None


def _tensor_problem(tensor: TensorSpec, sizes: Sequence[int]) -> str | None:
    if not 0 <= tensor.sid < len(sizes):
        return f"lies in storage {tensor.sid}, which does not exist"
    reach = _reach(tensor.dtype, tensor.shape, tensor.stride, tensor.offset)
    if isinstance(reach, str):
        return reach
    if reach > sizes[tensor.sid]:
        return f"reaches beyond the {sizes[tensor.sid]} bytes of storage {tensor.sid}"
    return None


@functools.lru_cache(maxsize=4096)  # a model has thousands of tensors, but few shapes
def _reach(name: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> int | str:
    """Return where a tensor's last element ends in its storage, in bytes; the problem as text if invalid."""
    dtype = DTYPES.get(name)
    if dtype is None:
        return f"has the unknown dtype {name!r}"
    if len(shape) != len(stride) or len(shape) > DIMENSIONS_LIMIT:
        return f"has {len(shape)} dimensions and {len(stride)} strides"
    if offset < 0 or (shape and (min(shape) < 0 or min(stride) < 0)):
        return "has a negative size, stride or offset"
    if max(offset, *shape, *stride, math.prod(shape)) >= _COUNT_LIMIT:
        return "has a size, stride or offset that is too large"
    if 0 in shape:
        return 0
    last = offset
    for size, step in zip(shape, stride, strict=True):
        last += (size - 1) * step
    return (last + 1) * dtype.nbytes
