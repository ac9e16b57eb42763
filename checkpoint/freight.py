"""Copies out of a snapshot into host memory, collected first and then done at once by several threads.

One by one, in the order in which a restore walks through modules and optimizers, they would take one core
and a page fault for every 4 KiB of new memory.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from gpuslice.kernels import copying
from gpuslice.kernels.host import overlap

from .header import covers
from .layout import TensorSpec
from .snapshot import SnapshotFile

_ORDINARY = (torch.Tensor, torch.nn.Parameter)


class Freight:
    """What is to be copied out of one snapshot.

    Parameters
    ----------
    snapshot
        Its bytes must have been verified when they are taken.
    """

    def __init__(self, snapshot: SnapshotFile) -> None:
        self._snapshot = snapshot
        #: By address and size of the target: where in the snapshot its bytes are, and whose memory it is.
        self._moves: dict[tuple[int, int], tuple[int, torch.UntypedStorage]] = {}
        #: Those of them that are to memory made by `new`.
        self._fresh: list[tuple[int, int]] = []

    def take(self, live: torch.Tensor, spec: TensorSpec) -> bool:
        """Take a copy of one of the snapshot's tensors into ``live``, of the same shape and dtype.

        Returns
        -------
        bool
            Whether it will be done; only what lies in host memory in one piece can be taken.
        """
        if not live.is_cpu or live.stride() != spec.stride or not live.is_contiguous():
            return False
        if type(live) not in _ORDINARY and hasattr(type(live), "__tensor_flatten__"):
            return False
        if live.is_inference() or live.is_conj() or live.is_neg():
            return False
        nbytes = live.nbytes
        if nbytes:
            # As torch's own copies do: a pending graph must see that its tensor has changed.
            torch.autograd.graph.increment_version(live)
            start = self._snapshot.offsets[spec.sid] + spec.offset * live.element_size()
            self._add(live.data_ptr(), nbytes, start, live.untyped_storage())
        return True

    def new(self, spec: TensorSpec) -> torch.Tensor:
        """One of the snapshot's tensors, over new host memory; holds anything until `deliver`."""
        nbytes = self._snapshot.storages[spec.sid].nbytes
        if covers(spec, nbytes):  # as nearly all do: its memory is made with it
            dtype = getattr(torch, spec.dtype)
            made = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="cpu")
        else:
            made = over(torch.UntypedStorage(nbytes, device="cpu"), spec)  # type: ignore[no-untyped-call]
        if nbytes:
            storage = made.untyped_storage()
            self._add(storage.data_ptr(), nbytes, self._snapshot.offsets[spec.sid], storage)
            self._fresh.append((storage.data_ptr(), nbytes))
        return made

    def _add(self, address: int, nbytes: int, start: int, owner: torch.UntypedStorage) -> None:
        self._moves.pop((address, nbytes), None)
        self._moves[address, nbytes] = start, owner  # the last one counts, as if they were done in turn

    def deliver(self) -> None:
        """Do all copies; afterwards every target holds what it should."""
        moves, self._moves = self._moves, {}
        fresh, self._fresh = self._fresh, []
        places = [(address, start, nbytes) for (address, nbytes), (start, _) in moves.items()]
        starts, sizes = np.array(list(moves), np.int64).reshape(-1, 2).T
        overlapping = overlap(starts, starts + sizes)
        # Where views of one memory come from different bytes, the last one must win: one after the other.
        for portion in ([place] for place in places) if overlapping else [places]:
            copying.copy_in_at(
                portion,
                self._snapshot.arena,
                len(os.sched_getaffinity(0)),
                fresh=() if overlapping else fresh,
            )

    def drop(self) -> None:
        """Forget what was not delivered."""
        self._moves.clear()
        self._fresh.clear()


def over(storage: torch.UntypedStorage, spec: TensorSpec) -> torch.Tensor:
    """One of a snapshot's tensors over a storage like its own."""
    empty = torch.empty(0, dtype=getattr(torch, spec.dtype), device=storage.device)
    return empty.set_(storage, spec.offset, spec.shape, spec.stride)
