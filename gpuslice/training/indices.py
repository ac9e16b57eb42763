"""The indices that a loader's sampler draws: a checksum of them, and skipping those already done."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeGuard

from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from gpuslice.errors import RefusedSnapshotError


class Drawn:
    """An iterator over a sampler's indices, with a checksum of all indices so far."""

    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices
        self.checksum = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        drawn = next(self._indices)
        self.checksum = zlib.crc32(repr(drawn).encode(), self.checksum)
        return drawn


def asks_by_index(iterator: object) -> TypeGuard[Any]:
    """Return True for a loader's iterator that draws indices in this process for each batch it fetches."""
    return isinstance(iterator, _SingleProcessDataLoaderIter) and iterator._dataset_kind == _DatasetKind.Map


def skip(iterator: Iterator[Any], batches: int) -> None:
    """Skip ``batches`` batches that are done. Raise ``RefusedSnapshotError`` if there are fewer.

    For a loader without workers and a dataset with indices, advancing the sampler is enough. Otherwise the
    batches are fetched again, so that the workers' generators and the dataset's own loop advance, too.
    """
    if asks_by_index(iterator):
        skipped = sum(1 for _ in islice(iterator._sampler_iter, batches))
        iterator._num_yielded += skipped
    else:
        skipped = sum(1 for _ in islice(iterator, batches))
    if skipped < batches:
        raise RefusedSnapshotError(
            f"the loader has {skipped} batches, but {batches} were done when the snapshot was taken",
            "restart with the same data and batch size",
        )
