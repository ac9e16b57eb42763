"""Copies out of a snapshot into host memory, collected first and then done at once by several threads.

One by one, in the order in which a restore walks through modules and optimizers, they would take one core
and a page fault for every 4 KiB of new memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import compress
from operator import attrgetter, eq

import numpy as np
import torch

from gpuslice.checkpoint.format.dtypes import DTYPES
from gpuslice.checkpoint.format.layout import TensorSpec, columns
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.kernels.host import copies
from gpuslice.kernels.host.process_memory import overlap

_ORDINARY = {torch.Tensor, torch.nn.Parameter}
_is_cpu = attrgetter("is_cpu")
_nbytes = attrgetter("nbytes")
_sid = attrgetter("sid")


class BatchedCopy:
    """What is to be copied out of one snapshot.

    Parameters
    ----------
    snapshot
        Its bytes must have been verified when they are taken, or shall not be.
    """

    def __init__(self, snapshot: SnapshotFile) -> None:
        self._snapshot = snapshot
        #: Of each copy the target's address, where in the snapshot its bytes are, and how many.
        self._places: list[tuple[int, int, int]] = []
        #: Address and bytes of what `new` made.
        self._fresh: list[tuple[int, int]] = []
        #: Whose memory the targets are.
        self._owners: list[torch.UntypedStorage] = []

    def take(self, lives: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> bool:
        """Take copies of some of the snapshot's tensors into live ones of the same shapes and dtypes.

        Returns
        -------
        bool
            Whether they will be done, all or none; only what lies in host memory in one piece can be taken.
        """
        tensors = columns(specs)
        if not _in_one_piece(lives, tensors.strides):
            return False
        sizes = list(map(_nbytes, lives))
        # As torch's own copies do: a pending graph must see that its tensor has changed.
        torch.autograd.graph.increment_version(list(compress(lives, sizes)))
        begin = map(self._snapshot.offsets.__getitem__, tensors.sids)
        starts = [
            first + offset * DTYPES[dtype].nbytes
            for first, offset, dtype in zip(begin, tensors.offsets, tensors.dtypes, strict=True)
        ]
        self._add(
            list(map(torch.Tensor.untyped_storage, lives)), map(torch.Tensor.data_ptr, lives), starts, sizes
        )
        return True

    def new(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """Some of the snapshot's tensors, each over new host memory; they hold anything until `deliver`."""
        sids = list(map(_sid, specs))
        sizes = [self._snapshot.storages[sid].nbytes for sid in sids]
        storages = [torch.UntypedStorage(0, device="cpu") for _ in specs]  # type: ignore[no-untyped-call]
        offsets = map(self._snapshot.offsets.__getitem__, sids)
        for storage, nbytes in zip(storages, sizes, strict=True):
            storage.resize_(nbytes)
        addresses = list(map(torch.UntypedStorage.data_ptr, storages))
        self._add(storages, addresses, offsets, sizes)
        self._fresh += zip(addresses, sizes, strict=True)
        return list(map(over, storages, specs))

    def _add(
        self,
        owners: Sequence[torch.UntypedStorage],
        addresses: Iterable[int],
        starts: Iterable[int],
        sizes: Sequence[int],
    ) -> None:
        self._owners += owners
        self._places += compress(zip(addresses, starts, sizes, strict=True), sizes)

    def deliver(self) -> None:
        """Do all copies; afterwards every target holds what it should."""
        places, fresh, owners = self._places, self._fresh, self._owners
        self.drop()
        overlapping = _overlap(places)
        if overlapping:
            # As if they were done in turn: of those to the very same memory the last one counts.
            last = {(address, nbytes): place for place in places for address, _, nbytes in [place]}
            places = [place for place in places if last[place[0], place[2]] is place]
            overlapping = _overlap(places)
        # Where views of one memory come from different bytes, the last one must win: one after the other.
        for portion in ([place] for place in places) if overlapping else [places]:
            copies.copy_in_at(portion, self._snapshot.arena, _threads(), fresh=fresh)
        del owners  # until now, nobody else's memory may be there

    def drop(self) -> None:
        """Forget what was not delivered."""
        self._places, self._fresh, self._owners = [], [], []


def _overlap(places: Sequence[tuple[int, int, int]]) -> bool:
    starts, _, sizes = np.array(places, np.int64).reshape(-1, 3).T
    return overlap(starts, starts + sizes)


def _in_one_piece(lives: Sequence[torch.Tensor], strides: Sequence[tuple[int, ...]]) -> bool:
    """Whether all are host memory that a copy of bytes fills as torch would."""
    tensor = torch.Tensor
    if not all(map(_is_cpu, lives)) or not all(map(eq, map(tensor.stride, lives), strides)):
        return False
    if any(hasattr(kind, "__tensor_flatten__") for kind in set(map(type, lives)) - _ORDINARY):
        return False
    special = (tensor.is_inference, tensor.is_conj, tensor.is_neg)
    return all(map(tensor.is_contiguous, lives)) and not any(any(map(kind, lives)) for kind in special)


def _threads() -> int:
    return len(os.sched_getaffinity(0))


def over(storage: torch.UntypedStorage, spec: TensorSpec) -> torch.Tensor:
    """One of a snapshot's tensors over a storage like its own."""
    empty = torch.empty(0, dtype=getattr(torch, spec.dtype), device=storage.device)
    return empty.set_(storage, spec.offset, spec.shape, spec.stride)
