"""Duplex swap: out of one process and into another at once, portion by portion, on one device.

The rule that nothing is emptied before everything is published does not hold here, so the undo must be as
exact: what has been emptied lies, with its checksums, in the arena of the one that leaves, and comes back
from there after the other has given back what it took. The other is parked all the while: whatever becomes
of it, its own snapshot is whole (docs/duplex.md).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gpuslice.checkpoint.ramdisk.writer import SnapshotWriter
from gpuslice.errors import DeviceMemoryError
from gpuslice.kernels import Device
from gpuslice.kernels.transfer import Transfer
from gpuslice.kernels.undo import undone_by

from .capture_plan import CapturePlan
from .record import Stages
from .swap_endpoints import PredecessorEnd, Successor, SuccessorEnd

#: How often the one that could not leave tries to get its memory back while the other does not say a word.
_AGAIN_S = 1.0


class Leaving:
    """A suspend that gives memory back while it goes on.

    Parameters
    ----------
    predecessor
        Its end of the swap.
    """

    def __init__(
        self,
        device: Device,
        plan: CapturePlan,
        writer: SnapshotWriter,
        predecessor: PredecessorEnd,
        stages: Stages,
    ) -> None:
        self._device = device
        self._plan = plan
        self._writer = writer
        self._swap = predecessor
        self._stages = stages
        self._storages = [*plan.storages, *plan.extras]
        #: Both stay what they are when the snapshot is published, or given up.
        self._arena, self._checksums = writer.arena, writer.checksums
        #: Positions of the storages that have been emptied, or were about to be.
        self._gone: list[int] = []

    @property
    def emptied(self) -> bool:
        """Whether the device has been emptied."""
        return bool(self._gone)

    def copy_out(self) -> Transfer:
        """Copy everything into the arena, and empty each portion behind it if the successor can use that."""
        if self._swap.problem:
            with self._stages.stage("copy_out_s"):
                return self._plan.copy_out(self._device, self._writer)
        before_bytes = self._device.memory().reserved_bytes
        transfer = self._copy(range(len(self._plan.storages), len(self._storages)))
        regions = self._device.regions(self._plan.storages)
        for portion in portions(self._plan.layout.sizes, regions, self._swap.portion_bytes):
            transfer += self._copy(portion)
            with self._stages.stage("free_s"):
                self._gone += portion
                self._plan.empty(self._device, portion)
                given_bytes = before_bytes - self._device.memory().reserved_bytes
            self._swap.gave(given_bytes)
            self._stages.record.bytes_given = max(self._stages.record.bytes_given, given_bytes)
        return transfer

    def _copy(self, sids: Sequence[int]) -> Transfer:
        """These of the layout's storages."""
        pairs = [(self._storages[sid], self._writer.offsets[sid]) for sid in sids]
        with self._stages.stage("copy_out_s"):
            return self._writer.take(self._device, pairs)

    def _reclaim(self) -> None:
        """Have the memory again; the other gives back first what it took.

        There is no limit to the waiting but the other's end: whoever gave up would lose the state.

        Raises
        ------
        DeviceMemoryError
            If the other has given everything back, and somebody else has taken it.
        """
        back = not self._gone or self._swap.await_back(self._swap.patience_s)
        attempts = max(1, int(self._swap.patience_s / _AGAIN_S))
        while True:
            try:
                self._plan.reserve(self._device, self._gone)
                return
            except DeviceMemoryError:
                attempts -= back
                if not attempts:
                    raise
            if back:
                threading.Event().wait(_AGAIN_S)  # somebody else's memory may become free
            else:
                back = self._swap.await_back(_AGAIN_S)

    def _undo(self) -> None:
        """Put everything back where it was."""
        self._reclaim()
        pairs = [(self._storages[sid], self._writer.offsets[sid]) for sid in self._gone]
        verifier = self._checksums.verifier()
        self._device.copy_in(pairs, self._arena, verifier, verifier)

    @contextmanager
    def undone_if_it_fails(self) -> Iterator[None]:
        """Undo what fails inside, tell the other how it went, and close the connection."""
        try:
            with undone_by(self._undo, "leaving in portions"):
                try:
                    yield
                except BaseException as error:
                    self._swap.failed(error)
                    raise
            self._swap.whole()
        finally:
            self._swap.close()


def meet(
    successor: Successor | None,
    device: Device,
    plan: CapturePlan,
    writer: SnapshotWriter,
    stages: Stages,
) -> Leaving | None:
    """The way to leave together with a successor; ``None`` if there is none, or it does not wait."""
    if successor is None or not plan.in_parts:
        return None
    with stages.stage("admit_s"):
        predecessor = successor.meet(plan.emptied_bytes)
    return None if predecessor is None else Leaving(device, plan, writer, predecessor, stages)


def copy_out(
    device: Device, plan: CapturePlan, writer: SnapshotWriter, leaving: Leaving | None, stages: Stages
) -> None:
    """Copy everything into the arena, portion by portion if somebody takes the device over, and note how."""
    if leaving is not None:
        copied = leaving.copy_out()
    else:
        with stages.stage("copy_out_s"):
            copied = plan.copy_out(device, writer)
    stages.record.copy_out, stages.record.bytes_unchanged = copied, copied.unchanged_bytes


def arrive(
    device: Device,
    sizes: Sequence[int],
    swap: SuccessorEnd,
    stages: Stages,
    bring: Callable[[Sequence[int]], Transfer],
) -> Transfer:
    """Take memory while somebody else is still giving it back: a portion whenever there is room for it.

    Returns when everything is there, and the device is this process's own.

    Parameters
    ----------
    sizes
        Bytes of the storages.
    bring
        Reserves and fills those at some positions of ``sizes``.

    Raises
    ------
    HandoverError
        If the one that was to leave did not.
    DeviceMemoryError
        If there is not enough memory although it has left.
    """
    transfer = Transfer()
    memory = device.memory()
    free_bytes = memory.total_bytes - memory.used_bytes
    missing_bytes = sum(sizes) - free_bytes - swap.offered_bytes
    swap.answer(f"it would lack {missing_bytes} bytes even then" if missing_bytes > 0 else "")
    todo = deque(portions(sizes, range(len(sizes)), swap.portion_bytes))
    taken_bytes = 0
    while todo and missing_bytes <= 0:
        nbytes = sum(sizes[sid] for sid in todo[0])
        with stages.stage("handover_s"):
            swap.await_given(taken_bytes + nbytes - free_bytes)
        if swap.vacated:
            break
        try:
            transfer += bring(todo[0])
        except DeviceMemoryError:  # the allocator needs more than the sum: wait for the next portion
            free_bytes -= nbytes
            continue
        todo.popleft()
        taken_bytes += nbytes
    stages.record.bytes_taken = taken_bytes
    with stages.stage("handover_s"):
        swap.await_vacated()
    return transfer + bring([sid for portion in todo for sid in portion])


def portions(sizes: Sequence[int], regions: Sequence[int], portion_bytes: int) -> list[list[int]]:
    """Positions of ``sizes`` in the order of their regions, in lists of ``portion_bytes`` or a little more.

    What is in one region stays together.
    """
    found: list[list[int]] = []
    room, region = 0, -1
    for position in sorted(range(len(regions)), key=regions.__getitem__):
        if not found or (room <= 0 and regions[position] != region):
            found.append([])
            room = portion_bytes
        found[-1].append(position)
        room -= sizes[position]
        region = regions[position]
    return found
