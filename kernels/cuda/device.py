"""GPUs as a device: copy engines move storages between the caching allocator and page-locked memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import shared_cache

from gpuslice.errors import EnvironmentUnusableError, SuspendRefusedError
from gpuslice.kernels.device import Device, DeviceMemory, Hold, Way
from gpuslice.kernels.host import copies
from gpuslice.kernels.host.numa import node_of_gpu
from gpuslice.kernels.host.process_memory import overlapping, view_address
from gpuslice.kernels.nvml import own_bytes
from gpuslice.kernels.transfer import Pairs, Transfer, Watchers
from gpuslice.kernels.undo import undone_by
from gpuslice.types import DeviceName

from . import allocator_memory, runtime_calls
from .copies import GpuCopy
from .engine import CudaEngine
from .page_locking import LOCKS, Runtime

_FREED = Hold(Way.FREED)
_OVERLAID = Hold(Way.RESIDENT, "another library knows its address")


class CudaDevice(Device):
    """``cuda:N`` by the tensor route, or ``cuda:0+1``: the GPUs over which one process divides its model.

    CUDA begins when the script begins it: until then a process may fork, choose an allocator or set what is
    visible, and has no memory to take away. Storages come back at other addresses, so stored addresses
    (captured CUDA graphs, pointers given to other libraries by DLPack) do not survive; live CUDA graphs are
    refused by name.

    If there are several GPUs, the first one stands for all where only one is possible. The process computes
    there unless its script says otherwise. All GPUs copy at the same time. A state on several GPUs does not
    move.

    Raises
    ------
    EnvironmentUnusableError
        If torch does not see all of these GPUs.
    """

    def __init__(self, name: DeviceName) -> None:
        count = runtime_calls.count_gpus()
        self._gpus = name.indices
        self._first = name.indices[0]
        if count is not None and max(self._gpus) >= count:
            raise EnvironmentUnusableError(
                f"{name} does not exist: torch {torch.__version__} sees {count} CUDA devices",
                "run `gpuslice doctor`, or use the device cpu",
            )
        self.name = name
        self.torch_device = torch.device("cuda", self._first)
        self.obstacles = {torch.cuda.CUDAGraph: "a captured CUDA graph holds addresses; use the route vmm"}
        self._engines = {gpu: CudaEngine(gpu) for gpu in self._gpus}
        self._made_on: dict[int, int] = {}

    @property
    def memory_node(self) -> int | None:
        """NUMA node next to all of the GPUs; None if they differ, or before CUDA has begun."""
        if not runtime_calls.has_begun():
            return None
        nodes = {node_of_gpu(uuid) for uuid in self._uuids()}
        return nodes.pop() if len(nodes) == 1 else None

    def _uuids(self) -> list[str]:
        return [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in self._gpus]

    def pin(self) -> None:
        runtime_calls.compute_on(self._first)

    def synchronize(self) -> None:
        if runtime_calls.has_begun():
            for gpu in self._gpus:
                torch.cuda.synchronize(gpu)

    def check_idle(self) -> None:
        if runtime_calls.has_begun() and torch.cuda.is_current_stream_capturing():
            raise SuspendRefusedError(
                f"{self.name} is capturing a CUDA graph", "suspend outside of the capture"
            )

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == "cuda" and storage.device.index in self._gpus

    def memory(self) -> DeviceMemory:
        """Return the sums over all GPUs. Memory that the allocator does not count counts as reserved."""
        if not runtime_calls.has_begun():
            return DeviceMemory(0, 0, 0, 0)  # asking for the rest would begin CUDA
        found = [torch.cuda.mem_get_info(gpu) for gpu in self._gpus]
        total_bytes = sum(total for _, total in found)
        used_bytes = total_bytes - sum(free for free, _ in found)
        allocated_bytes, reserved_bytes = map(self._counted, ("memory_allocated", "memory_reserved"))
        return DeviceMemory(
            total_bytes, used_bytes, allocated_bytes, used_bytes if reserved_bytes is None else reserved_bytes
        )

    def _counted(self, statistic: str) -> int | None:
        """Return the sum of a statistic of ``torch.cuda`` over all GPUs; None if it is not counted."""
        ask = getattr(torch.cuda, statistic)
        counts = [allocator_memory.statistics(partial(ask, gpu)) for gpu in self._gpus]
        return None if None in counts else sum(counts)

    def held(self, gone_bytes: int) -> dict[str, int]:
        """Return what stays on the GPUs while parked: allocator, graph pools, context and libraries.

        Only NVML knows the last part, and in a container it may not know this process.
        """
        if not runtime_calls.has_begun():
            return {}
        kept_bytes = max(0, (self._counted("memory_reserved") or 0) - gone_bytes)
        pools_bytes = 0 if gone_bytes else allocator_memory.graph_pools_bytes(self._gpus)
        found = {"graph_pools": pools_bytes, "allocator": max(0, kept_bytes - pools_bytes)}
        of_process = [own_bytes(uuid) for uuid in self._uuids()]
        if None not in of_process:
            found["context_and_libraries"] = max(0, sum(nbytes or 0 for nbytes in of_process) - kept_bytes)
        return {what: nbytes for what, nbytes in found.items() if nbytes}

    def holds(
        self, storages: Sequence[torch.UntypedStorage], *, fixed: Set[int], exposed: Set[int] = frozenset()
    ) -> list[Hold]:
        """Return how each storage is emptied. ``fixed`` is ignored.

        On a GPU, ``fixed`` means autograd or DDP, and both reach memory through the storage.
        """
        between_processes = {reference.cdata for reference in shared_cache.values()}
        holds = [_hold(storage, between_processes) for storage in storages]
        if all(hold is _FREED for hold in holds):
            return holds  # memory that torch allocated does not overlap
        return together(holds, [(storage.data_ptr(), storage.nbytes()) for storage in storages])

    def _copy(self, pairs: Pairs, arena: memoryview, watchers: Watchers, *, out: bool) -> Transfer:
        """Copy storages of the host by threads, then those of each GPU by its copy engines."""
        copy = copies.copy_out if out else copies.copy_in
        by_host = copy(_on_host(pairs), arena, watchers[0], _threads())
        carry_out = GpuCopy.out if out else GpuCopy.back
        return by_host + self._by_gpus(pairs, arena, lambda copy: carry_out(copy, *watchers))

    def _by_gpus(self, pairs: Pairs, arena: memoryview, carry_out: Callable[[GpuCopy], Transfer]) -> Transfer:
        """Copy each GPU's storages in a thread of its own. Return when all copies are done."""
        its_pairs: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}
        for pair in pairs:
            if pair[0].device.type == "cuda":
                its_pairs.setdefault(pair[0].device.index, []).append(pair)
        done: list[Transfer] = []

        def work(part: tuple[int, Pairs]) -> None:
            gpu, its = part
            with runtime_calls.on_gpu(gpu):
                done.append(carry_out(GpuCopy(self._engines[gpu], its, arena, _threads())))

        copies.run([[part] for part in its_pairs.items()], work, len(its_pairs))
        problem = LOCKS.problem(view_address(arena), arena.nbytes) if any(one.copies for one in done) else ""
        notes = (f"the arena is not page-locked: {problem}",) if problem else ()
        return sum(done, Transfer()) + Transfer(fallbacks=notes)

    def free(self, storages: Sequence[torch.UntypedStorage]) -> None:
        streams = _streams_by_address(allocator_memory.segments(self._gpus)) if storages else {}
        for storage in storages:
            if storage.nbytes():
                self._made_on[storage._cdata] = streams.get(storage.data_ptr(), 0)
                storage.resize_(0)

    def reserve(self, pairs: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        freed = [(storage, nbytes) for storage, nbytes in pairs if storage.nbytes() != nbytes]
        # One stream after the other: to enter a stream costs more than a small allocation.
        by_stream: dict[tuple[int, int], list[tuple[torch.UntypedStorage, int]]] = {}
        for storage, nbytes in freed:
            place = storage.device.index, self._made_on.get(storage._cdata, 0)
            by_stream.setdefault(place, []).append((storage, nbytes))

        def give_back() -> None:
            for storage, _ in freed:
                storage.resize_(0)
            self.release_caches()

        gpu = self._first
        try:
            with undone_by(give_back, f"taking memory of {self.name}"):
                for (gpu, pointer), those in by_stream.items():
                    with _on_stream(gpu, pointer):
                        allocator_memory.fill_up(those)
        except torch.OutOfMemoryError as error:
            needed_bytes = sum(nbytes for storage, nbytes in pairs if storage.device.index == gpu)
            raise allocator_memory.lack_of_memory(gpu, needed_bytes) from error
        for storage, _ in freed:
            self._made_on.pop(storage._cdata, None)

    def allocate(self, sizes: Sequence[int]) -> list[torch.UntypedStorage]:
        self._made_on.clear()  # of a state that has left for another device: its keys may come again
        return super().allocate(sizes)

    def release_caches(self, *, workspaces: bool = True) -> None:
        """Release the allocator's free segments, and with ``workspaces`` cuBLAS's workspaces."""
        if runtime_calls.has_begun():
            if workspaces:
                torch._C._cuda_clearCublasWorkspaces()
            with torch.cuda.device(self._first):
                torch.cuda.empty_cache()

    @property
    def registrations(self) -> int:
        return LOCKS.count

    def register(self, arena: memoryview) -> bool:
        """Page-lock the arena and load the kernels, so that a warmed-up arena needs no more set-up."""
        if not runtime_calls.has_begun():
            return False
        for engine in self._engines.values():
            engine.kernels_missing()
        return LOCKS.take(Runtime(self._first), view_address(arena), arena.nbytes)

    def unregister(self, arena: memoryview) -> None:
        LOCKS.release(Runtime(self._first), view_address(arena))

    def rng_state(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state(self._first) if runtime_calls.has_begun() else None

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self._first)


def _on_stream(gpu: int, pointer: int) -> torch.cuda.StreamContext:
    if pointer == 0:
        return torch.cuda.stream(torch.cuda.default_stream(gpu))
    return torch.cuda.stream(torch.cuda.ExternalStream(pointer, gpu))  # type: ignore[no-untyped-call]


def _streams_by_address(segments: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Return the stream of each block that was not allocated on the default stream, by address.

    The caching allocator reuses a block in the order of the stream it was allocated on. A storage that
    came back on another stream could be reused while kernels of its own stream still run.
    """
    found = {}
    for segment in segments:
        if segment["stream"] == 0:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            found[address] = segment["stream"]
            address += block["size"]
    return found


def _hold(storage: torch.UntypedStorage, between_processes: Set[int]) -> Hold:
    if storage._cdata in between_processes:
        return Hold(Way.RESIDENT, "shared with another process by CUDA IPC")
    if not storage.resizable():
        return Hold(Way.RESIDENT, "its memory belongs to another library")
    return _FREED


def together(holds: Sequence[Hold], ranges: Sequence[tuple[int, int]]) -> list[Hold]:
    """Return the holds, with every storage made resident that overlaps memory that stays.

    Such storages are views that went to another library and came back, for instance.

    Parameters
    ----------
    ranges
        Address and bytes of each storage.
    """
    starts = overlapping(ranges)
    staying = {start for start, hold in zip(starts, holds, strict=True) if hold is not _FREED}
    return [
        _OVERLAID if hold is _FREED and start in staying else hold
        for start, hold in zip(starts, holds, strict=True)
    ]


def _on_host(pairs: Pairs) -> Pairs:
    return [pair for pair in pairs if pair[0].device.type == "cpu"]


def _threads() -> int:
    return len(os.sched_getaffinity(0))
