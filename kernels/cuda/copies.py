"""Copies between a GPU's storages and an arena, by whatever moves the bytes: plan, queue, wait, inspect.

Chunks get their checksums from the GPU, before they leave it and after they have arrived there. Where it
cannot do that, threads inspect them while the copy engine moves other blocks: what has arrived, on the way
out; what is still to leave, on the way in. Both directions return, whatever happens, only when nothing is
under way any more.
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

#: A block of chunks, or of storages for one launch.
_Step = list[Piece] | Packed
_ALONE = "small storages are copied one by one"
_BY_HOST = "checksums are taken by the host"


class GpuCopy:
    """One copy between storages of a GPU and an arena; it keeps count of what was done.

    Parameters
    ----------
    threads
        How many inspect.
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
        """Copy into the arena; large chunks that are there by their ``checksums`` are left out."""
        with _synchronized(self._engine.lanes()) as lanes:
            packed, direct = self._plan()
            if checksums is not None:
                direct = self._changed(packed, direct, lanes[0], checksums)
            steps = self._steps(packed, direct, lanes, inspect)

            def arrive(arrival: tuple[Callable[[], None], _Step]) -> None:
                wait, step = arrival
                wait()
                self._inspect(inspect, step)

            # What has arrived is inspected while the rest is queued: without page-locks that is the copying.
            with copy_threads(arrive, self._threads if inspect and self._unseen(steps) else 0) as inspected:
                for number, step in enumerate(steps):
                    lane = lanes[number % len(lanes)]
                    self._queue(lane, step, out=True)
                    if inspect is not None and self._unseen([step]):
                        inspected((lane.record_event(), step))
        return self._transfer()

    def back(self, inspect: Inspector | None, checksums: Checksums | None = None) -> Transfer:
        """Copy from the arena; every piece is inspected before it leaves, or summed when it has arrived."""
        with _synchronized(self._engine.lanes()) as lanes:
            packed, direct = self._plan()
            summed = [] if checksums is None else self._summable(packed, direct)
            self._summed.update(summed)
            steps = self._steps(packed, direct, lanes, inspect)
            locks = [threading.Lock() for _ in lanes]

            def leave(numbered: tuple[int, _Step]) -> None:
                number, step = numbered
                self._inspect(inspect, step)
                # A lane has one staging buffer: filling and emptying it must not mix with another step's.
                with locks[number % len(lanes)]:
                    self._queue(lanes[number % len(lanes)], step, out=False)

            threads = self._threads if inspect and self._unseen(steps) else 1
            run([[item] for item in enumerate(steps)], leave, threads)
            if checksums is not None and summed:
                self._compare(summed, lanes, inspect, checksums)
        return self._transfer()

    def _plan(self) -> tuple[list[Packed], list[Piece]]:
        """What is packed, and all else in chunks."""
        numbers = copy_plan.small(self._places, self._pack_bytes)
        if numbers and (missing := self._engine.kernels_missing()):
            self._fallbacks.append(f"{_ALONE}: {missing}")
            numbers = []
        others = sorted(set(range(len(self._places))).difference(numbers))
        return copy_plan.pack(self._places, numbers), copy_plan.chunks(self._places, others)

    def _changed(
        self, packed: Sequence[Packed], direct: list[Piece], lane: CudaLane, checksums: Checksums
    ) -> list[Piece]:
        """The chunks of ``direct`` that the arena does not have yet, found by one launch over all chunks.

        What is packed is copied with its neighbours, changed or not.
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
        """See whether all chunks that the GPU sums have arrived as they were written."""
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
        """Chunks at addresses from which the kernel can read; none without kernels."""
        pieces = chain(direct, *(step.pieces for step in packed))
        found = [piece for piece in pieces if self._address(piece) % 16 == 0]
        if found and (missing := self._engine.kernels_missing()):
            self._fallbacks.append(f"{_BY_HOST}: {missing}")
            return []
        return found

    def _sums(self, summed: Sequence[Piece], lane: CudaLane, checksums: Checksums) -> list[int] | None:
        """By one launch; ``None`` if the GPU has no memory for that."""
        rows = [(self._address(piece), checksums.padded(piece.offset), piece.nbytes) for piece in summed]
        sums = lane.checksums(rows)
        if sums is None:
            self._fallbacks.append(f"{_BY_HOST}: too little memory of the GPU is free")
        else:
            self._launches += 1
        return sums

    def _unseen(self, steps: Sequence[_Step]) -> bool:
        """Whether an inspector has to look at any piece of these."""
        return not all(self._summed.issuperset(_pieces(step)) for step in steps)

    def _steps(
        self, packed: list[Packed], direct: list[Piece], lanes: Sequence[CudaLane], inspect: Inspector | None
    ) -> list[_Step]:
        """What is queued, in this order; the step of number n goes to lane n modulo their number."""
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
        """Have the lane carry a step from the device into the arena, or (not ``out``) back."""
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
        """Between the beginning of ``there`` and the arena; no copy may cross two page-locks."""
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
    """A mapping as a tensor; by address, because torch warns about read-only ones, which we only read."""
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    array = (ctypes.c_uint8 * memory.nbytes).from_address(view_address(memory))
    return torch.frombuffer(array, dtype=torch.uint8)


def bytes_of_storage(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def _synchronized(lanes: Sequence[CudaLane]) -> Iterator[Sequence[CudaLane]]:
    """Leave only when nothing is under way on any lane, whatever arrives meanwhile; that is raised then."""
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
