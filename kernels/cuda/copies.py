"""Copies between a GPU's storages and an arena, by whatever moves the bytes: plan, queue, wait, inspect.

While the copy engine moves one block, threads inspect others: those that have arrived, on the way out;
those that are still to leave, on the way in. Both directions return, whatever happens, only when nothing
is under way any more.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from gpuslice.kernels.host.copies import check, copy_threads, run
from gpuslice.kernels.host.process_memory import view_address
from gpuslice.kernels.transfer import Inspector, Marks, Pairs, Transfer

from . import copy_plan
from .copy_plan import Packed, Piece, Place
from .engine import CudaEngine, CudaLane
from .page_locking import LOCKS

#: A block of chunks, or of storages for one launch.
_Step = list[Piece] | Packed
_ALONE = "small storages are copied one by one"
_UNMARKED = "unchanged chunks are copied, too"


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
        self._copies = self._launches = self._packed_bytes = self._unchanged_bytes = 0
        self._fallbacks: list[str] = []

    def out(self, inspect: Inspector | None, marks: Marks | None) -> Transfer:
        """Copy into the arena; chunks that ``marks`` knows are left out."""
        with _synchronized(self._engine.lanes()) as lanes:
            packed, direct = self._plan()
            if marks is not None:
                direct = self._changed(direct, lanes[0], marks)
            steps = self._steps(packed, direct, lanes)

            def arrive(arrival: tuple[Callable[[], None], _Step]) -> None:
                wait, step = arrival
                wait()
                self._inspect(inspect, step)

            # What has arrived is inspected while the rest is queued: without page-locks that is the copying.
            with copy_threads(arrive, self._threads if inspect else 0) as inspected:
                for number, step in enumerate(steps):
                    lane = lanes[number % len(lanes)]
                    self._queue(lane, step, out=True)
                    if inspect is not None:
                        inspected((lane.record_event(), step))
        return self._transfer()

    def back(self, inspect: Inspector | None) -> Transfer:
        """Copy from the arena; every piece leaves it after it was inspected."""
        with _synchronized(self._engine.lanes()) as lanes:
            steps = self._steps(*self._plan(), lanes)
            locks = [threading.Lock() for _ in lanes]

            def leave(numbered: tuple[int, _Step]) -> None:
                number, step = numbered
                self._inspect(inspect, step)
                # A lane has one staging buffer: filling and emptying it must not mix with another step's.
                with locks[number % len(lanes)]:
                    self._queue(lanes[number % len(lanes)], step, out=False)

            run([[item] for item in enumerate(steps)], leave, self._threads if inspect else 1)
        return self._transfer()

    def _plan(self) -> tuple[list[Packed], list[Piece]]:
        """What is packed, and all else in chunks."""
        numbers = copy_plan.small(self._places, self._pack_bytes)
        if numbers and (missing := self._engine.kernels_missing()):
            self._fallbacks.append(f"{_ALONE}: {missing}")
            numbers = []
        others = sorted(set(range(len(self._places))).difference(numbers))
        return copy_plan.pack(self._places, numbers), copy_plan.chunks(self._places, others)

    def _changed(self, direct: list[Piece], lane: CudaLane, marks: Marks) -> list[Piece]:
        """The chunks that the arena does not have yet, found by one launch over all."""
        marked = [
            piece
            for piece in direct
            # Chunks of large storages, at addresses at which the kernel reads words.
            if self._places[piece.storage].nbytes >= self._pack_bytes and self._address(piece) % 8 == 0
        ]
        if not marked:
            return direct
        if missing := self._engine.kernels_missing():
            self._fallbacks.append(f"{_UNMARKED}: {missing}")
            return direct
        made = lane.marks([(self._address(piece), 0, piece.nbytes) for piece in marked])
        if made is None:
            self._fallbacks.append(f"{_UNMARKED}: too little memory of the GPU is free to compare them")
            return direct
        self._launches += 1
        known = {piece for piece, mark in zip(marked, made, strict=True) if marks(piece.offset, mark)}
        self._unchanged_bytes = sum(piece.nbytes for piece in known)
        return [piece for piece in direct if piece not in known]

    def _steps(self, packed: list[Packed], direct: list[Piece], lanes: Sequence[CudaLane]) -> list[_Step]:
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
        return [*steps, *copy_plan.blocks(direct)]

    def _address(self, piece: Piece) -> int:
        return self._addresses[piece.storage] + piece.start

    def _inspect(self, inspect: Inspector | None, step: _Step) -> None:
        if inspect is not None:
            for piece in step.pieces if isinstance(step, Packed) else step:
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
