"""A snapshot on its way into files that other ranks' snapshots may have in common with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuslice.checkpoint.files import open_checked
from gpuslice.checkpoint.format.gsnp import Record
from gpuslice.checkpoint.format.layout import Layout
from gpuslice.checkpoint.format.pieces import Piece, keys_and_trailer
from gpuslice.checkpoint.format.reader import SnapshotFile, map_pieces
from gpuslice.checkpoint.format.safetensors_header import Content

from .arena import Arena
from .shared_pieces import SharedPieces
from .writer import SnapshotWriter

if TYPE_CHECKING:  # the command line, which needs no torch, gets here, too
    import torch

    from gpuslice.kernels import Device
    from gpuslice.kernels.transfer import Pairs, Transfer


class SharedSnapshotWriter(SnapshotWriter):
    """Puts the payload into ``pieces``; the slot's own file gets the rest.

    Parameters
    ----------
    turn
        From which part of the state on it is copied, in 0 to 1: the ranks begin at different ones, so that
        each writes some of the pieces and finds the others.
    """

    def __init__(
        self,
        arena: Arena,
        layout: Layout,
        record: Record,
        previous: Content | None,
        finish: Callable[[SnapshotFile | None], None],
        pieces: SharedPieces,
        turn: float,
    ) -> None:
        self._pieces = pieces
        self._turn = turn
        self._placed: list[Piece] = []
        super().__init__(arena, layout, record, previous, finish)

    def _room(self) -> memoryview | None:
        return self._pieces.memory

    def take(self, device: Device, pairs: Iterable[tuple[torch.UntypedStorage, int]]) -> Transfer:
        """Copy storages of ``device`` to their pieces; their checksums are taken on the way."""
        going = self._rotated([pair for pair in pairs if pair[0].nbytes()])
        shared_before = self._pieces.shared_bytes
        copied = device.copy_out(going, self.arena, self._pieces.inspector(self.checksums))
        shared = min(self._pieces.shared_bytes - shared_before, copied.unchanged_bytes)
        # What the copy itself left to the pieces was written by threads of this process, or was there.
        host = copied.paths.get("host", 0) + copied.unchanged_bytes - shared
        paths = {**copied.paths, "host": host, "shared": shared, "unchanged": 0}
        return replace(copied, paths={path: nbytes for path, nbytes in paths.items() if nbytes})

    def take_later(self, device: Device, pairs: Pairs) -> None:
        """Copy storages that may change meanwhile: `publish` hashes what has arrived."""
        device.copy_out(self._rotated(pairs), self.arena, self._pieces.inspector(None))

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """As in the base class; what another rank here has, or this one's other slot, is not missing."""
        return self._pieces.missing(keys)

    def put(self, index: int, data: memoryview) -> None:
        """Take a piece of the payload, its padding included."""
        self._pieces.put(index, data)

    def _rotated(self, pairs: Pairs) -> Pairs:
        first = int(len(pairs) * self._turn)
        return [*pairs[first:], *pairs[:first]]

    @property
    def shared_bytes(self) -> int:
        """What was there already, bytes of padding included."""
        return self._pieces.shared_bytes

    def abort(self) -> None:
        """Give the slot and the room back; the previous snapshot stays the newest."""
        self._pieces.close()
        super().abort()

    def _extend(self, nbytes: int) -> int:
        self._placed = self._pieces.complete()
        self._arena.extend_file(nbytes - self._cut_bytes + len(self._trailer()))
        return nbytes

    @property
    def _cut_bytes(self) -> int:
        return self._placement.end - self._record.payload

    def _trailer(self) -> bytes:
        return keys_and_trailer(self._cut_bytes, [piece.key for piece in self._placed])

    def _write_tail(self, data: bytes) -> None:
        self._arena.write(data + self._trailer(), self._record.payload)

    def _mapped(self, record: Record) -> memoryview:
        descriptor = open_checked(self._arena.path)
        try:
            return map_pieces(self._arena.path, descriptor, record, self._placed)
        finally:
            os.close(descriptor)

    def _remember(self) -> None:
        """Nothing: the next snapshot finds the pieces by their names."""
