"""What a snapshot holds, and where each storage lies in the file: storages, tensors over them, placement.

The placement is a pure function of the sizes. A reader recomputes it and refuses a file that differs, so
overlapping, overflowing or misaligned ranges cannot occur.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import msgspec

PAGE_BYTES = 4096
#: Storages of this size and more begin on a page; smaller ones are packed.
LARGE_BYTES = 1 << 20
#: Alignment of packed storages: what CUDA's allocator gives, too.
SMALL_ALIGN_BYTES = 256
CHUNK_BYTES = 4 << 20


class StorageSpec(msgspec.Struct, frozen=True, gc=False):
    """One storage of a snapshot.

    Attributes
    ----------
    nbytes
        Size in bytes; may be zero.
    device
        Where it lived, ``cuda:0`` style.
    label
        For people; appears in error messages.
    """

    nbytes: int
    device: str = "cpu"
    label: str = ""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
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


@dataclass(frozen=True)
class Layout:
    """The storages of one snapshot. A storage's number, ``sid``, is its position here."""

    storages: tuple[StorageSpec, ...]

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each storage."""
        return tuple(storage.nbytes for storage in self.storages)

    @property
    def nbytes(self) -> int:
        """Bytes of all storages, without padding."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Placement:
    """Where storages lie: their ``offsets``, and the ``end`` of the last one's page.

    ``extents`` are start and end of every storage with its padding, in the order of the file.
    """

    offsets: tuple[int, ...]
    extents: tuple[tuple[int, int], ...]
    end: int

    @functools.cached_property
    def chunk_total(self) -> int:
        """Number of ``chunks``, which are made only when needed: a file may claim any number."""
        return sum(-(-(stop - start) // CHUNK_BYTES) for start, stop in self.extents)

    @functools.cached_property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Start and end of every checksummed chunk: the extents in steps of ``CHUNK_BYTES``, without gaps."""
        starts = [at for start, stop in self.extents for at in range(start, stop, CHUNK_BYTES)]
        return tuple(zip(starts, [*starts[1:], self.end], strict=False))

    @functools.cached_property
    def chunk_at(self) -> dict[int, int]:
        """Position in ``chunks`` of each chunk, by the offset at which it begins."""
        return {start: index for index, (start, _) in enumerate(self.chunks)}

    def padded(self, offset: int) -> int:
        """Return the length of the chunk that begins at ``offset``, padding included."""
        return self.chunks[self.chunk_at[offset]][1] - offset


def align(position: int, step: int) -> int:
    """Return the next multiple of ``step`` at or after ``position``."""
    return -(-position // step) * step


@functools.lru_cache(maxsize=8)  # jobs suspend the same layout again and again
def place(sizes: tuple[int, ...], payload: int) -> Placement:
    """Return the placement of storages of ``sizes`` bytes from ``payload`` on, a multiple of the page size.

    Large storages come first, in order, each at a page. Small ones follow, packed at 256 bytes. The last
    one's padding reaches to the end of its page.
    """
    offsets, extents, at = [0] * len(sizes), [], payload
    for sid in sorted(range(len(sizes)), key=lambda sid: sizes[sid] < LARGE_BYTES):
        end = at + align(sizes[sid], PAGE_BYTES if sizes[sid] >= LARGE_BYTES else SMALL_ALIGN_BYTES)
        extents.append((at, end))
        offsets[sid], at = at, end
    return Placement(tuple(offsets), tuple(extents), align(at, PAGE_BYTES))
