"""Copies out of a snapshot into host memory, collected first and then done at once by several threads.

One by one, in the order in which a restore walks through modules and optimizers, they would take one core
and a page fault for every 4 KiB of new memory.
"""

from __future__ import annotations

import os
from itertools import pairwise

import torch

from gpuslice.kernels import copying

from .layout import TensorSpec
from .snapshot import SnapshotFile


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
        in_one_piece = live.is_contiguous() and live.stride() == tuple(spec.stride)
        if live.device.type != "cpu" or not in_one_piece or hasattr(type(live), "__tensor_flatten__"):
            return False
        if live.is_inference() or live.is_conj() or live.is_neg():
            return False
        if live.nbytes:
            # As torch's own copies do: a pending graph must see that its tensor has changed.
            torch.autograd.graph.increment_version(live)
            start = self._snapshot.offsets[spec.sid] + spec.offset * live.element_size()
            self._add(live.data_ptr(), live.nbytes, start, live.untyped_storage())
        return True

    def new(self, sid: int) -> torch.UntypedStorage:
        """New host memory for a storage of the snapshot; holds anything until it is `delivered`."""
        nbytes = self._snapshot.storages[sid].nbytes
        storage = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
        if nbytes:
            self._add(storage.data_ptr(), nbytes, self._snapshot.offsets[sid], storage)
            self._fresh.append((storage.data_ptr(), nbytes))
        return storage

    def _add(self, address: int, nbytes: int, start: int, owner: torch.UntypedStorage) -> None:
        self._moves.pop((address, nbytes), None)
        self._moves[address, nbytes] = start, owner  # the last one counts, as if they were done in turn

    def deliver(self) -> None:
        """Do all copies; afterwards every target holds what it should."""
        moves, self._moves = self._moves, {}
        fresh, self._fresh = self._fresh, []
        places = [(address, start, nbytes) for (address, nbytes), (start, _) in moves.items()]
        ranges = sorted(moves)
        overlapping = any(first[0] + first[1] > second[0] for first, second in pairwise(ranges))
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
