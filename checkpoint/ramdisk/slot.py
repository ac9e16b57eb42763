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
        Record of the published snapshot; None without one.
    spilled
        True if that snapshot lies in the spill directory, and nothing of it here.
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
        """Record the snapshot that the slot holds now. It stays readable until the slot is needed."""
        self.record = snapshot.record
        self._written = weakref.ref(snapshot)

    def open(self) -> SnapshotFile:
        """Open the slot's snapshot where it lies. The slot is not freed before it is closed."""
        assert self.record is not None
        if self.spilled and self._spill is not None:
            return self._spill.open(self._store, self.record)
        snapshot = open_snapshot(self.arena.path)
        self._readers.add(snapshot)
        return snapshot

    def invalidate(self) -> None:
        """Remove the snapshot, in the slot and in the spill directory."""
        if self.record is not None and not self.spilled:
            self.arena.extend_file(PREAMBLE_BYTES)  # opens a former process's file
        if self.arena.opened:
            self.arena.tear()
        self.record = None
        self._close_file()
        self.drop_spilled()
        remove_pieces(self.arena.path)

    def remove_file(self, *, pieces: bool = True) -> None:
        """Remove the slot's file and snapshot. With ``pieces`` also its pieces."""
        self._close_file()
        self.arena.discard(pieces=pieces)
        self.record = None
        self.drop_spilled()

    def _close_file(self) -> None:
        snapshot = None if self._written is None else self._written()
        if snapshot is not None:
            snapshot.close()

    def drop_spilled(self) -> None:
        """Remove the snapshot from the spill directory, if it lies there."""
        if self._spill is not None and self.spilled:
            self._spill.drop(self._store, self.number)
            self.spilled = False

    def recover(self, spilled: Record) -> None:
        """Choose between a dead process's spilled snapshot and the slot's file, and remove the other."""
        here = self.record
        newer = here is not None and here.generation >= spilled.generation
        self.spilled = True
        if not spilled.restartable or (newer and is_whole(self.arena.path)):
            self.drop_spilled()
        else:
            self.arena.discard()
            self.record = spilled

    def free_memory(self, pause: Pause = carry_on, *, wanted: bool = False) -> bool:
        """Give up the slot's room, if it has any and no reader. Return True if room was freed.

        A needed snapshot is moved to the spill directory. It is needed if it is restartable or ``wanted``.
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
                return False  # damaged: it stays, and the process that needs it reports it
            self.spilled = True
        self._close_file()
        self.arena.discard()
        return True

    def bring_back(self, snapshot: SnapshotFile) -> None:
        """Make the bytes of the slot's snapshot readable again. They may have been spilled meanwhile.

        They are read where they lie. If they are restartable, they stay there until the slot is needed.
        Damaged ones (``SnapshotError``) stay, too.
        """
        if self.spilled:
            with self.open() as spilled:
                snapshot.attach(spilled.arena)
            if not snapshot.restartable:
                self.drop_spilled()
