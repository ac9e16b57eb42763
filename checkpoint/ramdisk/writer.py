"""Write a snapshot into an arena, or into pieces: copied in storage by storage, then published."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from gpuslice.checkpoint.files import flush_directory, open_checked
from gpuslice.checkpoint.format.checksums import ChecksumRecorder, Digests, fingerprint
from gpuslice.checkpoint.format.gsnp import Record
from gpuslice.checkpoint.format.layout import Layout, TensorSpec, place
from gpuslice.checkpoint.format.pieces import Piece, keys_and_trailer, piece_ranges
from gpuslice.checkpoint.format.reader import DAMAGED, SnapshotFile, map_pieces
from gpuslice.checkpoint.format.safetensors_header import PREAMBLE_BYTES, Content
from gpuslice.errors import CorruptSnapshotError, UsageError

from .arena import Arena
from .shared_pieces import SharedPieces

if TYPE_CHECKING:  # the command line imports this module without torch
    import torch

    from gpuslice.kernels import Device
    from gpuslice.kernels.transfer import Pairs, Transfer


class SnapshotWriter:
    """A snapshot being written into the ``memory`` of an arena; made by ``JobStore.begin``.

    `take` every storage from its device, or copy it into its `view`. Then call `publish`, or `abort`. As a
    context manager it aborts a snapshot that was not published.

    Attributes
    ----------
    checksums
        An inspector for copies into `arena`. `publish` reuses the checksums that it has taken.
    """

    def __init__(
        self,
        arena: Arena,
        memory: memoryview,
        layout: Layout,
        record: Record,
        previous: Content | None,
        finish: Callable[[SnapshotFile | None], None],
    ) -> None:
        self._arena = arena
        self._layout = layout
        self._record = record
        self._previous = previous
        self._finish = finish
        self._placement = place(layout.sizes, record.payload)
        self._memory: memoryview | None = memory
        known, arena.checksums = arena.checksums, None  # from here on the arena changes
        self.checksums = ChecksumRecorder(self.arena, self._placement, known)

    @property
    def arena(self) -> memoryview:
        """The whole mapping, as a device registers it."""
        self._check_open()
        assert self._memory is not None
        return self._memory

    def _check_open(self) -> None:
        if self._memory is None:
            raise UsageError("this snapshot was published or aborted", "call begin() again")

    @property
    def offsets(self) -> Sequence[int]:
        """Offset of each storage in `arena`."""
        return self._placement.offsets

    def view(self, sid: int) -> memoryview:
        """Return writable bytes for storage ``sid``, aligned to pages from 1 MiB on, else to 256 bytes."""
        offset = self._placement.offsets[sid]
        return self.arena[offset : offset + self._layout.storages[sid].nbytes]

    def take(self, device: Device, pairs: Iterable[tuple[torch.UntypedStorage, int]]) -> Transfer:
        """Copy storages of ``device`` to their offsets in `arena`, and take their checksums on the way."""
        going = [pair for pair in pairs if pair[0].nbytes()]
        return device.copy_out(going, self.arena, self.checksums, self.checksums)

    def take_later(self, device: Device, pairs: Pairs) -> None:
        """Copy storages in the background, which may change meanwhile. `publish` hashes the copies."""
        device.copy_out(pairs, self.arena)

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Return the numbers of the pieces that the payload lacks, compared with a snapshot elsewhere.

        Parameters
        ----------
        keys
            The XXH3-128 of each piece (`pieces.piece_ranges`). Every byte that is here is hashed.
        """
        present = (fingerprint(self.arena[start:stop]) for start, stop in self._pieces_at)
        return [index for index, found in enumerate(present) if found != keys[index]]

    def copy_equal(self, snapshot: SnapshotFile, digests: Digests) -> None:
        """Copy chunks of another snapshot with the wanted checksum and place. `missing` checks the copies."""
        if snapshot.content.placement == self._placement:
            chunks = self._placement.chunks
            for (start, stop), found, wanted in zip(chunks, snapshot.digests, digests, strict=True):
                if found == wanted:
                    self.arena[start:stop] = snapshot.arena[start:stop]

    def put(self, index: int, data: memoryview) -> None:
        """Take a piece of the payload, padding included. `publish` hashes it."""
        start, stop = self._pieces_at[index]
        self.arena[start:stop] = data

    @functools.cached_property
    def _pieces_at(self) -> tuple[tuple[int, int], ...]:
        return piece_ranges(self._placement)

    @property
    def shared_bytes(self) -> int:
        """Bytes that this snapshot shares with others, so that they take no room of their own."""
        return 0

    def publish(
        self,
        tree: bytes,
        tensors: Sequence[TensorSpec],
        *,
        boundary: int,
        restartable: bool,
        expected: Digests | None = None,
    ) -> SnapshotFile:
        """Checksum everything, write the tail, and make the snapshot the store's newest, in this order.

        Parameters
        ----------
        expected
            The required checksums, if they are known.

        Raises
        ------
        CorruptSnapshotError
            If they are not; nothing was written, and the writer stays open.
        UsageError
            If a tensor does not fit its storage, naming it, or the tree is too large; the writer stays open.
        RamDiskFullError
            If the metadata needs more room than there is; the previous snapshot stays the newest.
        """
        self._check_open()
        if boundary < 0:
            raise UsageError(f"boundary {boundary} is negative", "count boundaries from 0")
        content = self._describe(tuple(tensors))
        digests = self.checksums.digests()
        if expected is not None and digests != expected:
            raise CorruptSnapshotError(f"what arrived for {self._arena.path} is not what was sent", DAMAGED)
        record = replace(self._record, boundary=boundary, restartable=restartable)
        record, header, tail = content.complete(record, tree, digests, self._extend)
        self._write(header, tail)
        snapshot = SnapshotFile(self._arena.path, record, content, tree, digests, self._mapped(record))
        self._finish(snapshot)
        if self._memory is self._arena.memory:  # the next snapshot skips unchanged chunks
            self._arena.checksums = self.checksums.arena_checksums()
        self._memory = None
        return snapshot

    def _mapped(self, record: Record) -> memoryview:
        """Return the file for readers of the snapshot."""
        del record
        return self.arena

    def abort(self) -> None:
        """Give up the snapshot. The previous one stays the newest. Does nothing after `publish`."""
        if self._memory is not None:
            self._memory = None
            self._finish(None)

    def _describe(self, tensors: tuple[TensorSpec, ...]) -> Content:
        """Return the content, the previous one if it still fits: jobs rarely change their tensors."""
        previous = self._previous
        if previous and previous.layout == self._layout and previous.tensors == tensors:
            return previous
        return Content.build(self._layout, self._record.payload, tensors)

    def _write(self, header: bytes, tail: bytes) -> None:
        """Write tail and header; last of all its first bytes, without which the file is no snapshot."""
        self._write_tail(tail)
        self._arena.write(header[PREAMBLE_BYTES:], PREAMBLE_BYTES)
        store = self._arena.path.parent
        flush_directory(store)
        flush_directory(store.parent)
        self._arena.write(header[:PREAMBLE_BYTES], 0)

    def _extend(self, nbytes: int) -> int:
        """Make the file long enough for a snapshot of ``nbytes``. Return its length."""
        return self._arena.extend_file(nbytes)

    def _write_tail(self, data: bytes) -> None:
        self._arena.write(data, self._placement.end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


class SharedSnapshotWriter(SnapshotWriter):
    """A writer that puts the payload into ``pieces``. The slot's own file gets the rest.

    Parameters
    ----------
    turn
        The part of the state at which the copy begins, in 0 to 1. The ranks begin at different parts, so that
        each writes some of the pieces and finds the others.
    """

    def __init__(
        self,
        arena: Arena,
        pieces: SharedPieces,
        layout: Layout,
        record: Record,
        previous: Content | None,
        finish: Callable[[SnapshotFile | None], None],
        turn: float,
    ) -> None:
        super().__init__(arena, pieces.memory, layout, record, previous, finish)
        self._pieces = pieces
        self._turn = turn
        self._placed: list[Piece] = []

    def take(self, device: Device, pairs: Iterable[tuple[torch.UntypedStorage, int]]) -> Transfer:
        """Copy storages of ``device`` to their pieces, and take their checksums on the way."""
        going = self._rotated([pair for pair in pairs if pair[0].nbytes()])
        shared_before = self._pieces.shared_bytes
        copied = device.copy_out(going, self.arena, self._pieces.inspector(self.checksums))
        shared = min(self._pieces.shared_bytes - shared_before, copied.unchanged_bytes)
        # Bytes left to the pieces were written by threads of this process, or were there.
        host = copied.paths.get("host", 0) + copied.unchanged_bytes - shared
        paths = {**copied.paths, "host": host, "shared": shared, "unchanged": 0}
        return replace(copied, paths={path: nbytes for path, nbytes in paths.items() if nbytes})

    def take_later(self, device: Device, pairs: Pairs) -> None:
        """Copy storages in the background, which may change meanwhile. `publish` hashes the copies."""
        device.copy_out(self._rotated(pairs), self.arena, self._pieces.inspector(None))

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Return the missing pieces. Those in another rank's slot, or in this rank's other slot, are not."""
        return self._pieces.missing(keys)

    def put(self, index: int, data: memoryview) -> None:
        """Take a piece of the payload, padding included."""
        self._pieces.put(index, data)

    def _rotated(self, pairs: Pairs) -> Pairs:
        first = int(len(pairs) * self._turn)
        return [*pairs[first:], *pairs[:first]]

    @property
    def shared_bytes(self) -> int:
        """Bytes of the payload that other snapshots had already, padding included."""
        return self._pieces.shared_bytes

    def abort(self) -> None:
        """Give up the snapshot and the room. The previous one stays the newest."""
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
