"""What a snapshot holds, and where each storage lies in the file: storages, tensors over them, placement.

Placement is a pure function of the sizes, so a reader recomputes it and refuses any file that
says otherwise: ranges that overlap, overflow or are misaligned cannot get in.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from gpuslice.errors import UsageError

PAGE_BYTES = 4096
#: Storages of this size and more begin on a page; smaller ones are packed.
LARGE_BYTES = 1 << 20
#: Alignment of packed storages: what CUDA's allocator gives, too.
SMALL_ALIGN_BYTES = 256
CHUNK_BYTES = 4 << 20


class StorageSpec(msgspec.Struct, frozen=True):
    """One storage to be saved.

    Attributes
    ----------
    sid
        Its number: the position in ``Layout.storages``.
    nbytes
        Size in bytes; may be zero.
    device
        Where it lived, ``cuda:0`` style.
    label
        For people; appears in error messages.
    """

    sid: int
    nbytes: int
    device: str = "cpu"
    label: str = ""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor as a strided view of a storage, so ties and views stay what they are.

    Attributes
    ----------
    path
        Where the job keeps it, ``model.layer.weight`` style.
    sid
        The storage.
    dtype
        torch's name without ``torch.``, one of ``dtypes.DTYPES``.
    shape, stride
        Per dimension; stride in elements.
    offset
        First element, in elements from the storage's start.
    """

    path: str
    sid: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """The storages of one snapshot, numbered 0, 1, 2, ... in file order."""

    storages: tuple[StorageSpec, ...]

    def __post_init__(self) -> None:
        for position, storage in enumerate(self.storages):
            if storage.sid != position or storage.nbytes < 0:
                raise UsageError(
                    f"storage {storage.sid} of {storage.nbytes} bytes stands at position {position}",
                    "number storages 0, 1, 2, ... and give sizes of zero or more",
                )

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage."""
        return [storage.nbytes for storage in self.storages]

    @property
    def nbytes(self) -> int:
        """Bytes of all storages, without padding."""
        return sum(self.sizes)


class Extent(NamedTuple):
    """A page-aligned range of the file: one large storage, or all small ones together."""

    offset: int
    nbytes: int


class Placement(NamedTuple):
    """Where everything lies. ``extents`` cover ``[payload, end)`` without a hole.

    ``first_chunk`` is a large storage's first position in the chunk table (0 for small ones).
    """

    offsets: tuple[int, ...]
    extents: tuple[Extent, ...]
    first_chunk: tuple[int, ...]
    end: int


def align(position: int, step: int) -> int:
    """The next multiple of ``step`` at or after ``position``."""
    return -(-position // step) * step


def place(sizes: Sequence[int], payload: int) -> Placement:
    """Lay storages of ``sizes`` bytes out from ``payload`` on, a multiple of the page size.

    Large ones come first, in order, each at a page; small ones follow, packed at 256 bytes.
    """
    return _place(tuple(sizes), payload)


@functools.lru_cache(maxsize=8)  # jobs suspend the same layout again and again
def _place(sizes: tuple[int, ...], payload: int) -> Placement:
    offsets = [0] * len(sizes)
    first_chunk = [0] * len(sizes)
    extents: list[Extent] = []
    position, chunk = payload, 0
    for sid, nbytes in enumerate(sizes):
        if nbytes >= LARGE_BYTES:
            offsets[sid], first_chunk[sid] = position, chunk
            extents.append(Extent(position, align(nbytes, PAGE_BYTES)))
            position += extents[-1].nbytes
            chunk += chunk_count(nbytes)
    slab = position
    for sid, nbytes in enumerate(sizes):
        if nbytes < LARGE_BYTES:
            offsets[sid] = position
            position += align(nbytes, SMALL_ALIGN_BYTES)
    end = align(position, PAGE_BYTES)
    if end > slab:
        extents.append(Extent(slab, end - slab))
    return Placement(tuple(offsets), tuple(extents), tuple(first_chunk), end)


def chunk_count(nbytes: int) -> int:
    """How many chunks a large storage of ``nbytes`` has; its padding is checksummed, too."""
    return -(-align(nbytes, PAGE_BYTES) // CHUNK_BYTES)


def chunks(extents: Sequence[Extent]) -> Iterator[tuple[int, int]]:
    """Start and end of every checksummed chunk: each extent in steps of ``CHUNK_BYTES``."""
    for extent in extents:
        stop = extent.offset + extent.nbytes
        for start in range(extent.offset, stop, CHUNK_BYTES):
            yield start, min(start + CHUNK_BYTES, stop)
