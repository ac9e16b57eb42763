"""Copies between a GPU's storages and an arena: plan, queue, wait, inspect.

The GPU takes the checksums of chunks, before they leave it and after they have arrived there. If it cannot,
threads inspect chunks while the copy engine moves others: those that have arrived on the way out, those still
to leave on the way in. Whatever happens, both directions return only when no copy is under way any more.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch

from gpuslice.kernels.host.copies import check, copy_threads, run
from gpuslice.kernels.host.process_memory import view_address
from gpuslice.kernels.transfer import Checksums, Inspector, Pairs, Transfer

from . import copy_plan
from .copy_plan import Packed, Piece, Place
from .engine import CudaEngine, CudaLane
from .page_locking import LOCKS

#: A block of chunks, or the storages of one launch.
_Step = list[Piece] | Packed
_ALONE = "small storages are copied one by one"
_BY_HOST = "checksums are taken by the host"


class GpuCopy:
    """One copy between storages of a GPU and an arena, with its statistics.

    Parameters
    ----------
    threads
        Number of threads that inspect.
    pack_bytes
        Smaller storages are packed.
    """

    def __init__(
        self,
        engine: CudaEngine,
        pairs: Pairs,
        arena: memoryview,
        threads: int,
        *,
        pack_bytes: int = copy_plan.PACK_BYTES,
    ) -> None:
        self._engine = engine
        self._threads = threads
        self._pack_bytes = pack_bytes
        self._storages = [storage for storage, _ in pairs]
        self._addresses = [storage.data_ptr() for storage in self._storages]
        self._places = [Place(offset, storage.nbytes()) for storage, offset in pairs]
        check(self._places, len(arena))
        self._arena = arena
        self._bytes = bytes_of_memory(arena)
        self._base = view_address(arena) if arena.nbytes else 0
        self._staging: dict[int, torch.Tensor] = {}
        #: Chunks whose checksums the GPU takes.
        self._summed: set[Piece] = set()
        self._copies = self._launches = self._packed_bytes = self._unchanged_bytes = 0
        self._fallbacks: list[str] = []

    def out(self, inspect: Inspector | None, checksums: Checksums | None = None) -> Transfer:
        """Copy into the arena. Large chunks that ``checksums`` finds there already are left out."""
        with _synchronized(self._engine.lanes()) as lanes:
            packed, direct = self._plan()
            if checksums is not None:
                direct = self._changed(packed, direct, lanes[0], checksums)
            steps = self._steps(packed, direct, lanes, inspect)

            def arrive(arrival: tuple[Callable[[], None], _Step]) -> None:
                wait, step = arrival
                wait()
                self._inspect(inspect, step)

            # Inspect arrived blocks while others are queued. Without page-locks, queueing itself copies.
            with copy_threads(arrive, self._threads if inspect and self._unseen(steps) else 0) as inspected:
                for number, step in enumerate(steps):
                    lane = lanes[number % len(lanes)]
                    self._queue(lane, step, out=True)
                    if inspect is not None and self._unseen([step]):
                        inspected((lane.record_event(), step))
        return self._transfer()

    def back(self, inspect: Inspector | None, checksums: Checksums | None = None) -> Transfer:
        """Copy from the arena. Every piece is inspected before it leaves, or summed after it has arrived."""
        with _synchronized(self._engine.lanes()) as lanes:
            packed, direct = self._plan()
            summed = [] if checksums is None else self._summable(packed, direct)
            self._summed.update(summed)
            steps = self._steps(packed, direct, lanes, inspect)
            locks = [threading.Lock() for _ in lanes]

            def leave(numbered: tuple[int, _Step]) -> None:
                number, step = numbered
                self._inspect(inspect, step)
                # A lane has one staging buffer: two steps must not fill and empty it at the same time.
                with locks[number % len(lanes)]:
                    self._queue(lanes[number % len(lanes)], step, out=False)

            threads = self._threads if inspect and self._unseen(steps) else 1
            run([[item] for item in enumerate(steps)], leave, threads)
            if checksums is not None and summed:
                self._compare(summed, lanes, inspect, checksums)
        return self._transfer()

    def _plan(self) -> tuple[list[Packed], list[Piece]]:
        """Return the packed small storages, and everything else in chunks."""
        numbers = copy_plan.small(self._places, self._pack_bytes)
        if numbers and (missing := self._engine.kernels_missing()):
            self._fallbacks.append(f"{_ALONE}: {missing}")
            numbers = []
        others = sorted(set(range(len(self._places))).difference(numbers))
        return copy_plan.pack(self._places, numbers), copy_plan.chunks(self._places, others)

    def _changed(
        self, packed: Sequence[Packed], direct: list[Piece], lane: CudaLane, checksums: Checksums
    ) -> list[Piece]:
        """Return the chunks of ``direct`` that the arena lacks, found by one launch over all chunks.

        Packed storages are copied with their neighbours, changed or not.
        """
        summed = self._summable(packed, direct)
        sums = self._sums(summed, lane, checksums) if summed else None
        if sums is None:
            return direct
        there = {
            piece
            for piece, value in zip(summed, sums, strict=True)
            if checksums.note(piece.offset, piece.nbytes, value)
        }
        self._summed.update(summed)
        known = there.intersection(direct)
        self._unchanged_bytes = sum(piece.nbytes for piece in known)
        return [piece for piece in direct if piece not in known]

    def _compare(
        self, summed: list[Piece], lanes: Sequence[CudaLane], inspect: Inspector | None, checksums: Checksums
    ) -> None:
        """Check that all chunks which the GPU sums have arrived as they were written."""
        for other in lanes[1:]:
            lanes[0].follow(other)
        sums = self._sums(summed, lanes[0], checksums)
        if sums is None:
            self._summed.clear()
            run([[[piece]] for piece in summed], partial(self._inspect, inspect), self._threads)
            return
        for piece, value in zip(summed, sums, strict=True):
            checksums.note(piece.offset, piece.nbytes, value)

    def _summable(self, packed: Sequence[Packed], direct: Sequence[Piece]) -> list[Piece]:
        """Return the chunks that the checksum kernel can read (aligned to 16 bytes); none without kernels."""
        pieces = chain(direct, *(step.pieces for step in packed))
        found = [piece for piece in pieces if self._address(piece) % 16 == 0]
        if found and (missing := self._engine.kernels_missing()):
            self._fallbacks.append(f"{_BY_HOST}: {missing}")
            return []
        return found

    def _sums(self, summed: Sequence[Piece], lane: CudaLane, checksums: Checksums) -> list[int] | None:
        """Return the checksums of pieces, by one launch; None if the GPU has no memory for that."""
        rows = [(self._address(piece), checksums.padded(piece.offset), piece.nbytes) for piece in summed]
        sums = lane.checksums(rows)
        if sums is None:
            self._fallbacks.append(f"{_BY_HOST}: too little memory of the GPU is free")
        else:
            self._launches += 1
        return sums

    def _unseen(self, steps: Sequence[_Step]) -> bool:
        """Return True if the host's inspector has to look at any piece of these steps."""
        return not all(self._summed.issuperset(_pieces(step)) for step in steps)

    def _steps(
        self, packed: list[Packed], direct: list[Piece], lanes: Sequence[CudaLane], inspect: Inspector | None
    ) -> list[_Step]:
        """Return what is queued, in order. Step number n goes to lane n modulo the number of lanes."""
        steps: list[_Step] = [*packed]
        needed_bytes = max((step.nbytes for step in packed), default=0)
        for lane in lanes[: len(packed)]:
            buffer = lane.staging(needed_bytes)
            if buffer is None:
                self._staging.clear()
                self._fallbacks.append(
                    f"{_ALONE}: {needed_bytes} bytes of the GPU to gather them in are not free"
                )
                steps = [*copy_plan.blocks(piece for step in packed for piece in step.pieces)]
                break
            self._staging[id(lane)] = buffer
        seen = [piece for piece in direct if inspect is not None and piece not in self._summed]
        unseen = [piece for piece in direct if inspect is None or piece in self._summed]
        return [
            *steps,
            *copy_plan.blocks(seen),
            *copy_plan.blocks(unseen, copy_plan.UNSEEN_BLOCK_BYTES),
        ]

    def _address(self, piece: Piece) -> int:
        return self._addresses[piece.storage] + piece.start

    def _inspect(self, inspect: Inspector | None, step: _Step) -> None:
        if inspect is not None:
            for piece in _pieces(step):
                if piece not in self._summed:
                    inspect(piece.offset, self._arena[piece.offset : piece.offset + piece.nbytes])

    def _queue(self, lane: CudaLane, step: _Step, *, out: bool) -> None:
        """Queue a step on a lane: from the device into the arena, or (not ``out``) back."""
        if isinstance(step, list):
            for piece in copy_plan.copies(step):
                there = bytes_of_storage(self._storages[piece.storage])
                self._copy(lane, there[piece.start :], piece.offset, piece.nbytes, out=out)
            return
        staging = self._staging[id(lane)]
        table = [(self._address(piece), staged, piece.nbytes) for piece, staged in step.staged()]
        if out:
            lane.launch("gather", table, staging)
        for span in step.spans:
            self._copy(lane, staging[span.staged :], span.offset, span.nbytes, out=out)
        if not out:
            lane.launch("scatter", table, staging)
        self._packed_bytes += sum(piece.nbytes for piece in step.pieces)
        self._launches += 1

    def _copy(self, lane: CudaLane, there: torch.Tensor, offset: int, nbytes: int, *, out: bool) -> None:
        """Queue the copy between the start of ``there`` and the arena, divided at page-lock borders."""
        for at, part_bytes in LOCKS.apart(self._base + offset, nbytes):
            ends = self._bytes[offset + at : offset + at + part_bytes], there[at : at + part_bytes]
            lane.copy(*(ends if out else reversed(ends)))
            self._copies += 1

    def _transfer(self) -> Transfer:
        nbytes = sum(place.nbytes for place in self._places)
        paths = {"packed": self._packed_bytes, "unchanged": self._unchanged_bytes}
        paths["direct"] = nbytes - sum(paths.values())
        paths = {path: nbytes for path, nbytes in paths.items() if nbytes}
        return Transfer(paths, self._copies, self._launches, tuple(self._fallbacks))


def _pieces(step: _Step) -> Sequence[Piece]:
    return step.pieces if isinstance(step, Packed) else step


def bytes_of_memory(memory: memoryview) -> torch.Tensor:
    """Return a mapping as a tensor. It is made by address, because torch warns about read-only buffers."""
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    array = (ctypes.c_uint8 * memory.nbytes).from_address(view_address(memory))
    return torch.frombuffer(array, dtype=torch.uint8)


def bytes_of_storage(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def _synchronized(lanes: Sequence[CudaLane]) -> Iterator[Sequence[CudaLane]]:
    """Leave the block only when nothing is under way on any lane. Then raise what interrupted the wait."""
    try:
        yield lanes
    finally:
        interrupts: list[BaseException] = []
        waiting = list(lanes)
        while waiting:
            try:
                waiting[-1].wait()
                waiting.pop()
            except RuntimeError as error:  # CUDA itself has failed: nothing moves any more
                interrupts.append(error)
                waiting.pop()
            except BaseException as error:  # noqa: BLE001 - raised below, when the copy is over
                interrupts.append(error)
        if interrupts:
            raise interrupts[0]
