"""One rank's place in the RAM disk: its directory, its lock, its slots, and the work on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Self

from gpuslice.checkpoint.format.gsnp import RECORD_BYTES, Record
from gpuslice.checkpoint.format.layout import PAGE_BYTES, Layout, align, place
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.format.safetensors_header import Content, header_room
from gpuslice.checkpoint.gate import OWN_PREFIX
from gpuslice.checkpoint.locks import FileLock
from gpuslice.errors import GpusliceError, SnapshotError, UsageError

from .arena import Arena, MapHook
from .budget import Budget, Own
from .room_requests import SOCKET, RoomListener
from .shared_pieces import SharedPieces
from .slot import Slot
from .slots import SLOTS, published, settle
from .spill import Pause, SpillDirectory, carry_on
from .writer import SharedSnapshotWriter, SnapshotWriter


class JobStore:
    """This process's directory in the RAM disk, locked while it lives; made by ``RamDisk.open_store``.

    While other processes need room, slots that the job can do without go to ``spill``, if it is given.
    ``peers`` are the stores of the job's other ranks here, which may share pieces. ``SnapshotError`` if all
    that a dead process left is spilled and damaged.
    """

    def __init__(
        self,
        directory: Path,
        lock: FileLock,
        budget: Budget,
        job: str | None,
        rank: int,
        spill: SpillDirectory | None = None,
        peers: Sequence[Path] = (),
    ) -> None:
        self.directory = directory
        self._peers = tuple(peers)
        self.job = job
        self.rank = rank
        self._budget = budget
        self._spill = spill
        self._lock = lock
        self.slots = [Slot(directory, slot, budget, spill, self._own(slot)) for slot in range(len(SLOTS))]
        self._writer: SnapshotWriter | None = None
        self._content: Content | None = None
        #: True if the path of a snapshot was given out, so that it may be read at any time. Then all stay.
        self.handed_out = False
        #: True if each snapshot must be one file that shares nothing with other ranks'.
        self.whole_files = False
        #: Called, in the thread of its writer, when a snapshot has been published or given up.
        self.finished: Callable[[], object] | None = None
        self._warming: threading.Thread | None = None
        self._recover()
        self._generation = max((record.generation for record in self._records()), default=0)

    def _records(self) -> list[Record]:
        """Return the records of the published snapshots, here and spilled, newest first."""
        found = [slot.record for slot in self.slots if slot.record is not None]
        return sorted(found, key=lambda record: record.generation, reverse=True)

    def _recover(self) -> None:
        """Read which snapshots a dead process left here and in the spill directory."""
        for record in published(self.directory):
            self.slots[record.slot].record = record
        if self._spill is None:
            return
        damage: SnapshotError | None = None
        self._spill.clean_store(self.directory.name)
        for entry in self._spill.entries(self.directory.name):
            try:
                self.slots[entry.slot].recover(entry.record())
            except SnapshotError as error:
                damage = error
        if damage is not None and not any(record.restartable for record in self._records()):
            raise damage

    @property
    def closed(self) -> bool:
        """True if the store was closed, or belongs to the process that this one was forked from."""
        return not self._lock.held

    def bind(self, on_map: MapHook, on_unmap: MapHook, node: int | None = None) -> None:
        """Pass the arenas' mappings, present and later ones, to a device. Their pages come from ``node``.

        ``on_map`` gets every mapping once, ``on_unmap`` gets it before it goes away, and when other hooks are
        bound: ``store.bind(device.register, device.unregister, device.memory_node)``.
        """
        self.cool()
        for slot in self.slots:
            slot.arena.bind(on_map, on_unmap, node)

    def begin(self, layout: Layout, *, share: bool = False, resume: bool = False) -> SnapshotWriter:
        """Make room for a snapshot, and return a writer for it.

        Parameters
        ----------
        share
            Have in common with the other ranks' snapshots what is equal, if there are other ranks here. Room
            is then taken as it is needed: what the slot held is given up first, and the writer, too, may
            raise ``RamDiskFullError``. The newest restartable snapshot is as it was even then.
        resume
            Leave the slot's bytes where they are for `SnapshotWriter.missing`, which has to be called.

        Raises
        ------
        RamDiskFullError
            If there is not enough room; nothing was written, and every older snapshot is as it was.
        UsageError
            If the store is closed or another snapshot is being written.
        """
        self._check_open()
        if self._writer is not None:
            raise UsageError("a snapshot is being written already", "publish or abort it first")
        self.cool()
        slot = self._free_slot()
        record = Record(
            generation=self._generation + 1,
            slot=slot.number,
            rank=self.rank,
            payload=header_room(layout),
            job=self.job or "",
        )
        finish = partial(self._finish, slot)
        if share and self._peers and layout.nbytes and not self.whole_files:
            slot.remove_file(pieces=not resume)
            pieces, turn = self._pieces(slot, layout, record), self.rank / (len(self._peers) + 1) % 1
            self._writer = SharedSnapshotWriter(
                slot.arena, pieces, layout, record, self._content, finish, turn
            )
        else:
            memory = slot.arena.ensure(_room(layout))
            slot.invalidate()
            self._writer = SnapshotWriter(slot.arena, memory, layout, record, self._content, finish)
        return self._writer

    def _pieces(self, slot: Slot, layout: Layout, record: Record) -> SharedPieces:
        """Return the pieces of a new snapshot, which other slots and ranks may share."""
        other = self.slots[1 - slot.number].arena.path
        others = [other, *(peer / name for peer in self._peers for name in SLOTS)]
        placement = place(layout.sizes, record.payload)
        return SharedPieces(slot.arena.path, others, self._budget, placement, self._own(slot.number))

    def _own(self, slot: int) -> Own:
        """Return a function that makes room for a snapshot in ``slot`` by freeing the job's other slot."""
        return partial(self._free_memory, 1 - slot)

    def warm_up(self, layout: Layout, *, share: bool = False) -> threading.Thread | None:
        """Begin to prepare the arena of the next snapshot, if it is cold, for a state like ``layout``.

        This runs in a thread, because faulting in pages and locking them takes five to ten times as long as
        copying into them. All other calls here wait for its end. It leaves as much room to others as it
        takes. A lack of room is no error. A snapshot that is to ``share`` equal pieces has no arena.

        Returns
        -------
        threading.Thread or None
            The running thread; None if there is nothing to do, no room, or no thread.
        """
        self.cool()
        arena = self._free_slot().arena
        nbytes = _room(layout)
        if self.closed or self._writer is not None or arena.memory is not None or (share and self._peers):
            return None
        if 2 * nbytes > self._budget.room_bytes():
            return None
        warming = threading.Thread(
            target=_prepare, args=(arena, nbytes), name=f"{OWN_PREFIX}warm-up", daemon=True
        )
        with suppress(RuntimeError):  # the system gives no more threads
            warming.start()
            self._warming = warming
        return self._warming

    def cool(self) -> None:
        """Wait until the store's background work is done. Afterwards none of its threads runs."""
        warming, self._warming = self._warming, None
        if warming is not None:
            warming.join()

    def restartable(self) -> dict[int, SnapshotFile]:
        """Open the restartable snapshots, and return them by boundary, newest last.

        Each stays where it is until it is closed. Spilled ones are verified completely. ``SnapshotError`` if
        there is none, because the only ones are damaged.
        """
        found: dict[int, SnapshotFile] = {}
        damage: SnapshotError | None = None
        for record in reversed(self._records()):
            slot = self.slots[record.slot]
            if record.restartable:
                try:
                    found[record.boundary] = slot.open()
                except SnapshotError as error:
                    damage = error if slot.spilled else damage
        if damage is not None and not found:
            raise damage
        return found

    @property
    def boundaries(self) -> list[int]:
        """Boundaries of the published restartable snapshots, newest last."""
        return [record.boundary for record in reversed(self._records()) if record.restartable]

    def forget_after(self, boundary: int) -> None:
        """Remove the snapshots of later boundaries: the job continues from this one."""
        self._check_open()
        self.cool()
        for record in self._records():
            if record.boundary > boundary:
                self.slots[record.slot].invalidate()

    def _free_slot(self) -> Slot:
        """Return the slot for the next snapshot: the one without the newest restartable snapshot.

        A snapshot that is not restartable is worthless once its job runs again. Its slot, which is warm,
        takes the next one.
        """
        precious = next((record.slot for record in self._records() if record.restartable), 1)
        return self.slots[1 - precious]

    def _finish(self, slot: Slot, snapshot: SnapshotFile | None) -> None:
        """Record what a writer published in ``slot``, or remove it."""
        self._check_open()
        self._writer = None
        if snapshot is None:
            slot.invalidate()
        else:
            slot.publish(snapshot)
            self._generation = snapshot.generation
            self._content = snapshot.content
        finished = self.finished
        if finished is not None:
            finished()

    def offering(self, snapshot: SnapshotFile) -> AbstractContextManager[object]:
        """Return a context in which other processes may have the room of the parked job's slots.

        Parameters
        ----------
        snapshot
            The snapshot that the job resumes from. Call `bring_back` before that.
        """
        self._check_open()
        self.cool()
        if self._spill is None:
            return nullcontext()
        wanted = snapshot.record.slot

        def give(pause: Pause) -> bool:
            failure: GpusliceError | None = None
            for slot in (1 - wanted, wanted):
                try:
                    if self._free_memory(slot, pause, wanted=slot == wanted):
                        return True
                except GpusliceError as error:
                    failure = failure or error  # the other slot may still be freed
            if failure is not None:
                raise failure
            return False

        try:
            return RoomListener(self.directory / SOCKET, give)
        except (OSError, RuntimeError):
            return nullcontext()  # no room even for a socket, or no thread: then no process can ask for room

    def _free_memory(self, slot: int, pause: Pause = carry_on, *, wanted: bool = False) -> bool:
        """Free a slot's room if it is not needed here (`Slot.free_memory`). Return True if it was freed."""
        return not self.handed_out and self.slots[slot].free_memory(pause, wanted=wanted)

    def bring_back(self, snapshot: SnapshotFile) -> None:
        """Make the bytes of a snapshot readable that may have been spilled (`Slot.bring_back`)."""
        self.slots[snapshot.record.slot].bring_back(snapshot)

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError(
                f"the store {self.directory} is closed, or belongs to a process this one was forked from",
                "open another store",
            )

    def close(self, *, keep: bool) -> None:
        """Release the store. A snapshot that is being written is aborted.

        Parameters
        ----------
        keep
            Leave the newest snapshot for a later process: of a named job the newest restartable one,
            which `gpuslice ramdisk gc` keeps, too. Everything else goes in any case.
        """
        if self.closed:
            return
        if self._writer is not None:
            self._writer.abort()
        try:
            self._let_go()
        finally:
            with self._budget.lock():
                self._settle(keep=keep)
                self._lock.release()

    def _settle(self, *, keep: bool) -> None:
        """Keep the newest snapshot (of a named job the newest restartable one), or none. Remove the rest."""
        useful = (record for record in self._records() if record.restartable or self.job is None)
        kept = next(useful, None) if keep else None
        for slot in self.slots:
            if slot.record is not kept:
                slot.drop_spilled()
        settle(self.directory, () if kept is None or self.slots[kept.slot].spilled else [kept])

    def abandon(self) -> None:
        """Release the store without touching its files, as if the process had died."""
        if self.closed:
            return
        self._let_go()
        self._lock.release()

    def _let_go(self) -> None:
        self.cool()
        with ExitStack() as arenas:  # a failure in one does not stop the others
            for slot in self.slots:
                # The hooks refer to this store, and to the newest snapshot's mapping.
                arenas.callback(slot.arena.bind)
                arenas.callback(slot.arena.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(keep=self.job is not None)


def _prepare(arena: Arena, nbytes: int) -> None:
    with suppress(GpusliceError):  # the suspend that needs the arena will raise the same error
        arena.ensure(nbytes, ahead=True)


def _room(layout: Layout) -> int:
    """Return the bytes of an arena for a layout. The tail is a guess that makes growing at publish rare."""
    checksums = layout.nbytes // 2**18
    tail = align(4096 + 512 * len(layout.storages) + checksums, PAGE_BYTES) + RECORD_BYTES
    return place(layout.sizes, header_room(layout)).end + tail
