"""One of a store's two slots: its file, and the snapshot that was published in it, here or spilled."""

from __future__ import annotations

import weakref
from pathlib import Path

from gpuslice.checkpoint.format.gsnp import Record
from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.format.safetensors_header import PREAMBLE_BYTES
from gpuslice.errors import SnapshotError

from .arena import Arena
from .budget import Budget, Own
from .slots import SLOTS, remove_pieces
from .spill import Pause, SpillDirectory, carry_on, is_whole


class Slot:
    """A slot of a store whose lock the caller has.

    Attributes
    ----------
    number
        0 or 1.
    arena
        Its file.
    record
        Of the snapshot that was published in it; ``None`` without one.
    spilled
        Whether that snapshot lies in the spill directory, and nothing of it here.
    """

    def __init__(
        self, directory: Path, number: int, budget: Budget, spill: SpillDirectory | None, own: Own
    ) -> None:
        self.number = number
        self.arena = Arena(directory / SLOTS[number], budget, own)
        self.record: Record | None = None
        self.spilled = False
        self._store = directory.name
        self._spill = spill
        self._written: weakref.ref[SnapshotFile] | None = None
        self._readers: weakref.WeakSet[SnapshotFile] = weakref.WeakSet()

    def publish(self, snapshot: SnapshotFile) -> None:
        """It holds this snapshot now, which stays readable until the slot is needed."""
        self.record = snapshot.record
        self._written = weakref.ref(snapshot)

    def open(self) -> SnapshotFile:
        """Its snapshot, where it lies; the slot is not freed until that is closed. ``SnapshotError``."""
        assert self.record is not None
        if self.spilled and self._spill is not None:
            return self._spill.open(self._store, self.record)
        snapshot = open_snapshot(self.arena.path)
        self._readers.add(snapshot)
        return snapshot

    def invalidate(self) -> None:
        """There is no snapshot in it any more, nor is one of it in the spill directory."""
        if self.record is not None and not self.spilled:
            self.arena.extend_file(PREAMBLE_BYTES)  # opens what a former process left
        if self.arena.opened:
            self.arena.tear()
        self.record = None
        self._close_file()
        self.drop_spilled()
        remove_pieces(self.arena.path)

    def remove_file(self, *, pieces: bool = True) -> None:
        """Remove its file, then the rest: it holds nothing any more, but perhaps ``pieces``."""
        self._close_file()
        self.arena.discard(pieces=pieces)
        self.record = None
        self.drop_spilled()

    def _close_file(self) -> None:
        snapshot = None if self._written is None else self._written()
        if snapshot is not None:
            snapshot.close()

    def drop_spilled(self) -> None:
        """Remove its snapshot from the spill directory, if that is where it is."""
        if self._spill is not None and self.spilled:
            self._spill.drop(self._store, self.number)
            self.spilled = False

    def recover(self, spilled: Record) -> None:
        """Of a spilled snapshot that a dead process left and the file here, keep what counts."""
        here = self.record
        newer = here is not None and here.generation >= spilled.generation
        self.spilled = True
        if not spilled.restartable or (newer and is_whole(self.arena.path)):
            self.drop_spilled()
        else:
            self.arena.discard()
            self.record = spilled

    def free_memory(self, pause: Pause = carry_on, *, wanted: bool = False) -> bool:
        """Give up its room, if it has any and nobody reads it; what is needed is moved.

        A snapshot that another process can go on from is needed, or if it is ``wanted``.
        """
        read = any(not reader.closed for reader in self._readers)
        if self.spilled or read or not self.arena.path.exists():
            return False
        if self.record is None or not (self.record.restartable or wanted):
            self.record = None
        elif self._spill is None:
            return False
        else:
            try:
                self._spill.take(self.arena.path, self._store, self.number, pause)
            except SnapshotError:
                return False  # damaged: it stays for whoever needs it to find out
            self.spilled = True
        self._close_file()
        self.arena.discard()
        return True

    def bring_back(self, snapshot: SnapshotFile) -> None:
        """Have its snapshot's bytes at hand again, which may have been spilled while the job was parked.

        They are read where they are, and stay there until the slot is needed, if another process could go on
        from them. Damaged ones (``SnapshotError``) stay, too.
        """
        if self.spilled:
            with self.open() as spilled:
                snapshot.attach(spilled.arena)
            if not snapshot.restartable:
                self.drop_spilled()
