"""Copies between a GPU's storages and an arena, by whatever moves the bytes: plan, queue, wait, inspect.

While the copy engine moves one block, threads inspect others: those that have arrived, on the way out;
those that are still to leave, on the way in. Both directions return, whatever happens, only when nothing
is under way any more.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from gpuslice.kernels.host.copies import at_work, run
from gpuslice.kernels.host.process_memory import view_address
from gpuslice.kernels.transfer import Inspector, Marks, Pairs, Transfer

from . import copy_plan
from .copy_plan import Packed, Piece, Place, Span
from .engine import CudaEngine, CudaLane
from .page_locking import LOCKS

#: A block of chunks, or of storages for one launch.
_Step = list[Piece] | Packed
_ALONE = "small storages are copied one by one"
_UNMARKED = "unchanged chunks are copied, too"


class GpuCopies:
    """Both directions, by one engine.

    Parameters
    ----------
    threads
        How many inspect.
    pack_bytes, staging_bytes
        See ``pipeline``.
    """

    def __init__(
        self,
        engine: CudaEngine,
        threads: int,
        *,
        pack_bytes: int = copy_plan.PACK_BYTES,
        staging_bytes: int = copy_plan.STAGING_BYTES,
    ) -> None:
        self._engine = engine
        self._threads = threads
        self._pack_bytes = pack_bytes
        self._staging_bytes = staging_bytes

    def copy_out(
        self, pairs: Pairs, arena: memoryview, inspect: Inspector | None, marks: Marks | None
    ) -> Transfer:
        """Copy into ``arena``; chunks that ``marks`` knows are left out."""
        if not pairs:
            return Transfer()
        batch = _Batch(pairs, arena)
        with _settled(self._engine.lanes()) as lanes:
            packed, direct = self._plan(batch)
            if marks is not None:
                direct = self._changed(batch, direct, lanes[0], marks)
            steps = self._steps(batch, packed, direct, lanes)

            def arrive(arrival: tuple[Callable[[], None], Sequence[Piece]]) -> None:
                wait, pieces = arrival
                wait()
                batch.inspect(inspect, pieces)

            # What has arrived is inspected while the rest is queued: without page-locks that is the copying.
            with at_work(arrive, self._threads if inspect else 0) as inspected:
                for number, step in enumerate(steps):
                    lane = lanes[number % len(lanes)]
                    batch.queue(lane, step, out=True)
                    if inspect is not None:
                        inspected((lane.flag(), batch.pieces(step)))
        return batch.transfer()

    def copy_in(self, pairs: Pairs, arena: memoryview, inspect: Inspector | None) -> Transfer:
        """Copy from ``arena``; every piece leaves it after it was inspected."""
        if not pairs:
            return Transfer()
        batch = _Batch(pairs, arena)
        with _settled(self._engine.lanes()) as lanes:
            steps = self._steps(batch, *self._plan(batch), lanes)
            locks = [threading.Lock() for _ in lanes]

            def leave(numbered: tuple[int, _Step]) -> None:
                number, step = numbered
                batch.inspect(inspect, batch.pieces(step))
                # A lane has one staging buffer: filling and emptying it must not mix with another step's.
                with locks[number % len(lanes)]:
                    batch.queue(lanes[number % len(lanes)], step, out=False)

            run([[item] for item in enumerate(steps)], leave, self._threads if inspect else 1)
        return batch.transfer()

    def _plan(self, batch: _Batch) -> tuple[list[Packed], list[Piece]]:
        """What is packed, and all else in chunks."""
        numbers = copy_plan.small(batch.places, self._pack_bytes)
        if numbers and (missing := self._engine.kernels_missing()):
            batch.fallbacks.append(f"{_ALONE}: {missing}")
            numbers = []
        packed = set(numbers)
        others = (number for number in range(len(batch.places)) if number not in packed)
        return (
            copy_plan.pack(batch.places, numbers, self._staging_bytes),
            copy_plan.chunks(batch.places, others),
        )

    def _changed(self, batch: _Batch, direct: list[Piece], lane: CudaLane, marks: Marks) -> list[Piece]:
        """The chunks that the arena does not have yet, found by one launch over all."""
        marked = [piece for piece in direct if batch.can_be_marked(piece, self._pack_bytes)]
        if not marked:
            return direct
        if missing := self._engine.kernels_missing():
            batch.fallbacks.append(f"{_UNMARKED}: {missing}")
            return direct
        made = lane.marks([(batch.address(piece), 0, piece.nbytes) for piece in marked])
        if made is None:
            batch.fallbacks.append(f"{_UNMARKED}: too little memory of the GPU is free to compare them")
            return direct
        batch.launches += 1
        known = {piece for piece, mark in zip(marked, made, strict=True) if marks(piece.offset, mark)}
        batch.unchanged_bytes = sum(piece.nbytes for piece in known)
        return [piece for piece in direct if piece not in known]

    def _steps(
        self, batch: _Batch, packed: list[Packed], direct: list[Piece], lanes: Sequence[CudaLane]
    ) -> list[_Step]:
        """What is queued, in this order; the step of number n goes to lane n modulo their number."""
        steps: list[_Step] = [*packed]
        needed = max((step.nbytes for step in packed), default=0)
        if packed and not batch.reserve_staging(lanes[: len(packed)], needed):
            batch.fallbacks.append(f"{_ALONE}: {needed} bytes of the GPU to gather them in are not free")
            steps = [*copy_plan.blocks(piece for step in packed for piece in step.pieces)]
        return [*steps, *copy_plan.blocks(direct)]


class _Batch:
    """The storages of one copy, and what has become of them."""

    def __init__(self, pairs: Pairs, arena: memoryview) -> None:
        self._storages = [storage for storage, _ in pairs]
        self._addresses = [storage.data_ptr() for storage in self._storages]
        self.places = [Place(offset, storage.nbytes()) for storage, offset in pairs]
        copy_plan.check(self.places, len(arena))
        self._arena = arena
        self._bytes = bytes_of_memory(arena)
        self._base = view_address(arena) if arena.nbytes else 0
        self._staging: dict[int, torch.Tensor] = {}
        self._copies = 0
        self._packed_bytes = 0
        self.unchanged_bytes = 0
        self.launches = 0
        self.fallbacks: list[str] = []

    def address(self, piece: Piece) -> int:
        return self._addresses[piece.storage] + piece.start

    def can_be_marked(self, piece: Piece, smallest_bytes: int) -> bool:
        """A chunk of a large storage, at an address at which the kernel reads words."""
        return self.places[piece.storage].nbytes >= smallest_bytes and self.address(piece) % 8 == 0

    @staticmethod
    def pieces(step: _Step) -> Sequence[Piece]:
        return step.pieces if isinstance(step, Packed) else step

    def inspect(self, inspect: Inspector | None, pieces: Sequence[Piece]) -> None:
        if inspect is not None:
            for piece in pieces:
                inspect(piece.offset, self._arena[piece.offset : piece.offset + piece.nbytes])

    def reserve_staging(self, lanes: Sequence[CudaLane], nbytes: int) -> bool:
        """A buffer for each of these lanes, or for none."""
        for lane in lanes:
            buffer = lane.staging(nbytes)
            if buffer is None:
                self._staging.clear()
                return False
            self._staging[id(lane)] = buffer
        return True

    def queue(self, lane: CudaLane, step: _Step, *, out: bool) -> None:
        """Have the lane carry a step from the device into the arena, or (not ``out``) back."""
        if isinstance(step, list):
            for piece in self._copies_of(step):
                ends = self._in_arena(piece), self._on_device(piece)
                lane.copy(*(ends if out else reversed(ends)))
                self._copies += 1
            return
        staging = self._staging[id(lane)]
        table = [(self.address(piece), staged, piece.nbytes) for piece, staged in step.staged()]
        if out:
            lane.launch("gather", table, staging)
        for offset, staged, nbytes in self._apart(step.spans):
            ends = self._bytes[offset : offset + nbytes], staging[staged : staged + nbytes]
            lane.copy(*(ends if out else reversed(ends)))
        if not out:
            lane.launch("scatter", table, staging)
        self._copies += len(step.spans)
        self._packed_bytes += sum(piece.nbytes for piece in step.pieces)
        self.launches += 1

    def _copies_of(self, block: list[Piece]) -> Iterator[Piece]:
        """The fewest copies that move a block, none of them across two page-locks."""
        for storage, start, offset, nbytes in copy_plan.copies(block):
            for at, part_bytes in LOCKS.apart(self._base + offset, nbytes):
                yield Piece(storage, start + at, offset + at, part_bytes)

    def _apart(self, spans: Iterable[Span]) -> Iterator[Span]:
        for offset, staged, nbytes in spans:
            for at, part_bytes in LOCKS.apart(self._base + offset, nbytes):
                yield Span(offset + at, staged + at, part_bytes)

    def transfer(self) -> Transfer:
        nbytes = sum(place.nbytes for place in self.places)
        paths = {"packed": self._packed_bytes, "unchanged": self.unchanged_bytes}
        paths["direct"] = nbytes - sum(paths.values())
        paths = {path: nbytes for path, nbytes in paths.items() if nbytes}
        return Transfer(paths, self._copies, self.launches, tuple(self.fallbacks))

    def _in_arena(self, piece: Piece) -> torch.Tensor:
        return self._bytes[piece.offset : piece.offset + piece.nbytes]

    def _on_device(self, piece: Piece) -> torch.Tensor:
        return bytes_of_storage(self._storages[piece.storage])[piece.start : piece.start + piece.nbytes]


def bytes_of_memory(memory: memoryview) -> torch.Tensor:
    """A mapping as a tensor; by address, because torch warns about read-only ones, which we only read."""
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    array = (ctypes.c_uint8 * memory.nbytes).from_address(view_address(memory))
    return torch.frombuffer(array, dtype=torch.uint8)


def bytes_of_storage(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def _settled(lanes: Sequence[CudaLane]) -> Iterator[Sequence[CudaLane]]:
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
