"""What a store's two slots hold: snapshots that lie there, or that were moved to the spill directory."""

from __future__ import annotations

import weakref
from pathlib import Path

from gpuslice.checkpoint.format.gsnp import Record
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.format.safetensors_header import PREAMBLE_BYTES
from gpuslice.errors import RamDiskFullError, SnapshotError

from .arena import Arena
from .budget import Budget
from .room_requests import GoingOn
from .slots import (
    SLOTS,
    opened,
    published,
    remove_pieces,
    restartable,
    settle,
    whole,
)
from .spill import SpillDirectory, always, is_whole


class SlotContents:
    """The slots of one store, whose lock the caller has.

    Attributes
    ----------
    arenas
        The slots' files.
    published
        The records of the published snapshots, by slot.
    generation
        The newest one's; 0 before the first.
    """

    def __init__(self, directory: Path, budget: Budget, spill: SpillDirectory | None) -> None:
        self._directory = directory
        self._spill = spill
        self.arenas = [Arena(directory / name, budget) for name in SLOTS]
        self.published = {record.slot: record for record in published(directory)}
        self.generation = max((record.generation for record in self.published.values()), default=0)
        #: The slots whose snapshots lie in the spill directory.
        self._away: set[int] = set()
        self._written = weakref.WeakValueDictionary[int, SnapshotFile]()  # by slot
        self._readers: weakref.WeakSet[SnapshotFile] = weakref.WeakSet()  # opened here for others

    def precious_slot(self) -> int | None:
        """The slot of the newest restartable snapshot."""
        restartable = {
            record.generation: slot for slot, record in self.published.items() if record.restartable
        }
        return restartable[max(restartable)] if restartable else None

    def restartable(self) -> list[SnapshotFile]:
        """The snapshots that another process can go on from, opened, newest first.

        A slot is not vacated until its snapshot is closed.
        """
        wanted = [record for record in published(self._directory) if record.restartable]
        snapshots = list(opened(self._directory, wanted))
        self._readers.update(snapshots)
        return snapshots

    def commit(self, slot: int, snapshot: SnapshotFile) -> None:
        """Make what was written into ``slot`` the store's newest snapshot."""
        self.generation = snapshot.generation
        self.published[slot] = snapshot.record
        self._written[slot] = snapshot

    def tear(self, slot: int) -> None:
        """Tear the slot's header, so that nothing half written can be taken for a snapshot."""
        if self.arenas[slot].opened:
            self.arenas[slot].write(bytes(PREAMBLE_BYTES), 0)

    def forget(self, slot: int) -> None:
        """There is no snapshot in this slot any more, nor is one of it in the spill directory."""
        self.published.pop(slot, None)
        self._close_file(slot)
        self._drop_spilled(slot)
        remove_pieces(self.arenas[slot].path)

    def clear(self, slot: int) -> None:
        """Remove the slot's file, then the rest: it holds nothing any more."""
        self._close_file(slot)
        self.arenas[slot].discard()
        self.forget(slot)

    def forget_after(self, boundary: int) -> None:
        """Forget the snapshots of later boundaries."""
        for slot, record in list(self.published.items()):
            if record.boundary > boundary:
                if slot not in self._away:
                    self.arenas[slot].extend_file(PREAMBLE_BYTES)
                    self.tear(slot)
                self.forget(slot)

    def _close_file(self, slot: int) -> None:
        if (snapshot := self._written.get(slot)) is not None:
            snapshot.close()

    def _drop_spilled(self, slot: int) -> None:
        if self._spill is not None and slot in self._away:
            self._spill.drop(self._directory.name, slot)
            self._away.discard(slot)

    def recover(self) -> None:
        """Bring back what a process that died left in the spill directory, as far as there is room.

        What is damaged stays there: ``SnapshotError`` if there is no other snapshot to go on from.
        """
        if self._spill is None:
            return
        damage: SnapshotError | None = None
        self._spill.clean_store(self._directory.name)
        for entry in self._spill.entries(self._directory.name):
            try:
                self._recover(self._spill, entry.record())
            except SnapshotError as error:
                damage = error
        if damage is not None and not any(record.restartable for record in self.published.values()):
            raise damage

    def _recover(self, spill: SpillDirectory, record: Record) -> None:
        slot = record.slot
        here = self.published.get(slot)
        newer = here is not None and here.generation >= record.generation
        if record.restartable and not (newer and is_whole(self._directory / SLOTS[slot])):
            spill.fetch(self._directory.name, record, self.arenas[slot])
            self.published[slot] = record
            self.generation = max(self.generation, record.generation)
        self._away.add(slot)
        self._drop_spilled(slot)

    def vacate(self, slot: int, going_on: GoingOn = always, *, wanted: bool = False) -> bool:
        """Give up a slot's room, if it has any and nobody reads it; what is needed is moved."""
        arena = self.arenas[slot]
        read = any(not reader.closed and reader.path == arena.path for reader in self._readers)
        if slot in self._away or read or not arena.path.exists():
            return False
        record = self.published.get(slot)
        if record is None or not (record.restartable or wanted):
            self.published.pop(slot, None)
        elif self._spill is None:
            return False
        else:
            try:
                self._spill.take(arena.path, self._directory.name, slot, going_on)
            except SnapshotError:
                return False  # damaged: it stays for whoever needs it to find out
            self._away.add(slot)
        self._close_file(slot)
        arena.discard()
        return True

    def bring_back(self, snapshot: SnapshotFile) -> None:
        """Have the bytes of a snapshot at hand again that may have been spilled while the job was parked.

        Without room in the RAM disk they are read where they are, and stay there; damaged ones
        (``SnapshotError``), too.
        """
        record, name = snapshot.record, self._directory.name
        if self._spill is None or record.slot not in self._away:
            return
        try:
            snapshot.attach(self._spill.fetch(name, record, self.arenas[record.slot]))
        except RamDiskFullError:
            with self._spill.open(name, record) as spilled:
                snapshot.attach(spilled.arena)
        else:
            self._drop_spilled(record.slot)

    def settle(self, *, keep: bool, named: bool) -> None:
        """At the end of the store, with the RAM disk's lock held: leave the newest snapshot, or nothing.

        Of a ``named`` job it is the newest restartable one.
        """
        found = restartable(self._directory) if named else whole(self._directory)
        newest = next(found, None) if keep else None
        for slot in sorted(self._away, key=lambda slot: -self.published[slot].generation):
            record = self.published[slot]
            if keep and record.restartable and (newest is None or newest.generation < record.generation):
                newest = record
            else:
                self._drop_spilled(slot)
        settle(self._directory, None if newest is None or newest.slot in self._away else newest)
