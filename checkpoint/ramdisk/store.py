"""One rank's place in the RAM disk: its directory, its lock, and who is at work on its slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Self

from gpuslice.checkpoint.format.gsnp import RECORD_BYTES, Record
from gpuslice.checkpoint.format.layout import PAGE_BYTES, Layout, align, place
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.format.safetensors_header import Content, header_room
from gpuslice.checkpoint.locks import FileLock
from gpuslice.errors import GpusliceError, UsageError

from .arena import Arena, MapHook, MapHooks
from .budget import Budget
from .room_requests import SOCKET, SPARE, GoingOn, RoomListener
from .shared_pieces import SharedPieces
from .shared_writer import SharedSnapshotWriter
from .slot_contents import SlotContents
from .slots import SLOTS
from .spill import SpillDirectory
from .writer import SnapshotWriter

#: Begins with gpuslice's own prefix, which lets the thread pass the gate (``gpuslice.runtime.thread_gate``).
_THREAD = "gpuslice-warm-up"


class JobStore:
    """This process's directory in the RAM disk, locked while it lives; made by ``RamDisk.open_store``.

    Slots that their job can do without while somebody else needs the room go to ``spill``, if there is one.
    ``peers`` are the stores of the job's other ranks here, which may have pieces in common with this one.
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
        self._contents = SlotContents(directory, budget, spill)
        self._writer: SnapshotWriter | None = None
        self._content: Content | None = None
        #: Whether somebody knows the path of a snapshot here and may read it at any time: then all stay.
        self.handed_out = False
        #: Whether each snapshot must be one file, with nothing in common with other ranks'.
        self.whole_files = False
        self._warming: threading.Thread | None = None
        self._spare_listener: RoomListener | None = None

    @property
    def closed(self) -> bool:
        """Whether the store was closed, or belongs to the process this one was forked from."""
        return not self._lock.held

    def bind(self, on_map: MapHook, on_unmap: MapHook, node: int | None = None) -> None:
        """Tell a device about the arenas' mappings, the present and all later ones, of ``node``'s memory.

        ``on_map`` gets every mapping once, ``on_unmap`` the same one before it goes away, and also when
        others are bound: ``store.bind(device.register, device.unregister, device.memory_node)``.
        """
        self.cool()
        hooks = MapHooks(on_map, on_unmap, node)
        for arena in self._contents.arenas:
            arena.bind(hooks)

    def begin(self, layout: Layout, *, share: bool = False) -> SnapshotWriter:
        """Make room for a snapshot and begin to write it.

        Parameters
        ----------
        share
            Have in common with the other ranks' snapshots what is equal, if there are other ranks here. Room
            is then taken as it is needed: the writer, too, may raise ``RamDiskFullError``.

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
        slot, contents = self._free_slot(), self._contents
        arena = contents.arenas[slot]
        record = Record(
            generation=contents.generation + 1,
            slot=slot,
            rank=self.rank,
            payload=header_room(layout),
            job=self.job or "",
        )
        if share and self._peers and layout.nbytes and not self.whole_files:
            self._writer = self._begin_shared(arena, layout, record)
            return self._writer
        arena.ensure(_room(layout), own=self._own(slot))
        contents.tear(slot)
        contents.forget(slot)
        self._writer = SnapshotWriter(arena, layout, record, self._content, self._finish)
        return self._writer

    def _own(self, slot: int) -> Callable[[], bool]:
        """Gives up the other slot."""
        return lambda: not self.handed_out and self._contents.vacate(1 - slot)

    def _begin_shared(self, arena: Arena, layout: Layout, record: Record) -> SnapshotWriter:
        """Into pieces, for which what the slot held makes room at once."""
        slot = record.slot
        self._contents.clear(slot)
        ours = self.directory / SLOTS[1 - slot]
        others = [ours, *(peer / name for peer in self._peers for name in SLOTS)]
        placement = place(layout.sizes, record.payload)
        pieces = SharedPieces(arena.path, others, self._budget, placement, self._own(slot))
        ranks = len(self._peers) + 1
        turn = self.rank % ranks / ranks
        return SharedSnapshotWriter(arena, layout, record, self._content, self._finish, pieces, turn)

    def warm_up(self, layout: Layout, *, share: bool = False) -> threading.Thread | None:
        """Begin to make the arena for the next snapshot ready, if it is cold, for a state like ``layout``.

        In the background, since faulting in pages and locking them takes five to ten times as long as copying
        into them. Everything else here waits for its end. It takes no more than it leaves to others, and that
        there is no room is no error. A snapshot that is to ``share`` what is equal with others has no arena.

        Returns
        -------
        threading.Thread or None
            What is under way; nothing if there is nothing to do, or no room.
        """
        self.cool()
        arena = self._contents.arenas[self._free_slot()]
        nbytes = _room(layout)
        if self.closed or self._writer is not None or arena.memory is not None or (share and self._peers):
            return None
        if 2 * nbytes > self._budget.room_bytes():
            return None
        self._warming = threading.Thread(target=_prepare, args=(arena, nbytes), name=_THREAD, daemon=True)
        self._warming.start()
        return self._warming

    def cool(self) -> None:
        """End what is under way in the background; afterwards no thread of the store's is at work."""
        listener, self._spare_listener = self._spare_listener, None
        if listener is not None:
            listener.close()
        warming, self._warming = self._warming, None
        if warming is not None:
            warming.join()

    def restartable(self) -> dict[int, SnapshotFile]:
        """The snapshots here that this process can go on from, opened, by boundary.

        Each stays where it is until it is closed.
        """
        newest_last = reversed(self._contents.restartable())
        return {snapshot.boundary: snapshot for snapshot in newest_last}

    def forget_after(self, boundary: int) -> None:
        """Forget the snapshots of later boundaries: the job goes on from this one."""
        self._check_open()
        self.cool()
        self._contents.forget_after(boundary)

    def _free_slot(self) -> int:
        """The slot without the newest restartable snapshot; the first one if there is none.

        A snapshot that nobody else can go on from is worth nothing once its job runs again: its
        slot, warm as it is, takes the next one.
        """
        precious = self._contents.precious_slot()
        return 0 if precious is None else 1 - precious

    def _finish(self, slot: int, snapshot: SnapshotFile | None) -> None:
        """Commit what a writer wrote into ``slot``, or forget it."""
        self._check_open()
        if snapshot is None:
            self._writer = None
            self._contents.tear(slot)
            self._contents.forget(slot)
            return
        self._contents.commit(slot, snapshot)
        self._writer = None
        self._content = snapshot.content

    def recover(self) -> None:
        """Bring back what a process that died left in the spill directory (`SlotContents.recover`)."""
        self._contents.recover()

    def offering(self, snapshot: SnapshotFile) -> AbstractContextManager[object]:
        """Inside the block, whose job is parked, other processes may have the room of its slots.

        Parameters
        ----------
        snapshot
            What the job comes back from; `bring_back` before it does.
        """
        self._check_open()
        self.cool()
        if self._spill is None:
            return nullcontext()
        slot = snapshot.record.slot
        try:
            return RoomListener(
                self.directory / SOCKET, lambda going_on: self._give(going_on, slot, wanted=slot)
            )
        except OSError:
            return nullcontext()  # not even for a socket is there room: then nobody can ask for it

    def spare(self) -> None:
        """From now on, until the store is used again, other processes may have the room of its slots.

        The job runs: it needs them at its next suspend, which makes its arena anew. What somebody could go on
        from is moved to the spill directory; without one nothing is given, or that suspend might lack room.
        """
        if (
            self._spill is None
            or self.closed
            or self._writer is not None
            or self._spare_listener is not None
            or self.handed_out
        ):
            return
        last = self._free_slot()
        with suppress(OSError):
            self._spare_listener = RoomListener(
                self.directory / SPARE, lambda going_on: self._give(going_on, last)
            )

    def _give(self, going_on: GoingOn, last: int, *, wanted: int | None = None) -> bool:
        """Give up the room of one slot, that of ``last`` last; the job comes back from ``wanted``."""
        if self._warming is not None:
            self._warming.join()
        return any(self._contents.vacate(slot, going_on, wanted=slot == wanted) for slot in (1 - last, last))

    def bring_back(self, snapshot: SnapshotFile) -> None:
        """Have the bytes of a snapshot at hand that others may have spilled (`SlotContents.bring_back`)."""
        self._contents.bring_back(snapshot)

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError(
                f"the store {self.directory} is closed, or belongs to a process this one was forked from",
                "open another store",
            )

    def close(self, *, keep: bool) -> None:
        """Let go of the store; a snapshot that is being written is aborted.

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
                self._contents.settle(keep=keep, named=self.job is not None)
                self._lock.release()

    def abandon(self) -> None:
        """Let go of the store without touching what lies in it, as if the process had died."""
        if self.closed:
            return
        self._let_go()
        self._lock.release()

    def _let_go(self) -> None:
        self.cool()
        with ExitStack() as arenas:  # of which one that fails does not keep the others
            for arena in self._contents.arenas:
                # Whoever listened has this store, and the newest snapshot's mapping.
                arenas.callback(arena.bind, MapHooks())
                arenas.callback(arena.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(keep=self.job is not None)


def _prepare(arena: Arena, nbytes: int) -> None:
    with suppress(GpusliceError):  # the suspend that needs the arena will meet the same by itself
        arena.ensure(nbytes)


def _room(layout: Layout) -> int:
    """Bytes of an arena for it; of the tail a guess that makes growing at publish rare, not a bound."""
    checksums = layout.nbytes // 2**18
    tail = align(4096 + 512 * len(layout.storages) + checksums, PAGE_BYTES) + RECORD_BYTES
    return place(layout.sizes, header_room(layout)).end + tail
