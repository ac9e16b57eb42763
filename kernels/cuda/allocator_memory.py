"""Memory of torch's CUDA allocator: its statistics, and taking memory for many storages, all or none.

The caching allocator asks CUDA for one segment per large tensor and rounds it up to 2 MiB. A state that comes
back storage by storage would be rounded up each time, and might not fit any more. So memory is taken for many
storages at a time: one large segment is allocated and freed, and the allocator then divides it among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from itertools import groupby, islice
from typing import Any

import torch

from gpuslice.errors import DeviceMemoryError

from . import runtime_calls

#: Approximate size of a segment for many storages.
SEGMENT_BYTES = 512 << 20
#: The allocator packs smaller storages into shared segments anyway.
_LARGE_BYTES = 10 << 20
#: The allocator rounds sizes up to a multiple of this.
_ROUNDED_BYTES = 512


def statistics(ask: Callable[[], Any]) -> Any:
    """Call a statistics function of torch's allocator. Return None if the allocator keeps no count."""
    try:
        return ask()
    except (RuntimeError, NotImplementedError):
        return None


def held_by_gpu() -> tuple[int, list[int]] | None:
    """Return the current GPU and the bytes of live tensors on each GPU; None before CUDA has begun.

    An allocator that keeps no count is taken to hold one byte on the current GPU.
    """
    counts = _counts()
    if not counts:
        return None
    current = torch.cuda.current_device()
    return current, [int(gpu == current) if count is None else count for gpu, count in enumerate(counts)]


def held_elsewhere(index: int) -> dict[int, int]:
    """Return the bytes of live tensors on each GPU except ``index``, without zeros. Any thread may ask."""
    return {gpu: count for gpu, count in enumerate(_counts()) if count and gpu != index}


def _counts() -> list[int | None]:
    """Return the bytes of live tensors on each GPU, None where uncounted; no items before CUDA has begun."""
    gpus = range(torch.cuda.device_count()) if runtime_calls.has_begun() else ()
    return [statistics(functools.partial(torch.cuda.memory_allocated, gpu)) for gpu in gpus]


def segments(gpus: Collection[int]) -> list[dict[str, Any]]:
    """Return the native allocator's segments on these GPUs; an empty list for any other allocator."""
    if torch.cuda.get_allocator_backend() != "native":
        return []
    found = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return [segment for segment in found if segment["device"] in gpus]


def graph_pools_bytes(gpus: Collection[int]) -> int:
    """Return the bytes of segments in private pools: those of captured graphs, or of a ``MemPool``."""
    shared = (0, 0)
    return sum(
        segment["total_size"]
        for segment in segments(gpus)
        if tuple(segment.get("segment_pool_id", shared)) != shared
    )


def in_segments(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Divide sizes, in their order, among segments. Return each part's count and segment bytes (0: none)."""
    divided: list[list[int]] = []
    for large, group in groupby(sizes, lambda nbytes: nbytes >= _LARGE_BYTES):
        divided.append([])
        room = SEGMENT_BYTES
        for nbytes in group:
            if large and divided[-1] and nbytes > room:
                divided.append([])
                room = SEGMENT_BYTES
            divided[-1].append(nbytes)
            room -= nbytes
    return [(len(few), _segment_bytes(few)) for few in divided]


def _segment_bytes(sizes: Sequence[int]) -> int:
    if len(sizes) < 2 or sizes[0] < _LARGE_BYTES:
        return 0
    return sum(-(-nbytes // _ROUNDED_BYTES) * _ROUNDED_BYTES for nbytes in sizes)


def make_room(nbytes: int, device: torch.device) -> None:
    """Make the allocator cache one free segment of ``nbytes`` for the next requests, if there is memory."""
    if nbytes and torch.cuda.get_allocator_backend() == "native":
        try:
            torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return  # smaller ones may be there


def fill_up(wanted: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
    """Give storages of one GPU these sizes in bytes. Memory is taken for many at a time."""
    ahead = iter(wanted)
    for count, segment_bytes in in_segments([nbytes for _, nbytes in wanted]):
        make_room(segment_bytes, wanted[0][0].device)
        for storage, nbytes in islice(ahead, count):
            storage.resize_(nbytes)


def lack_of_memory(gpu: int, needed_bytes: int) -> DeviceMemoryError:
    """Return the error for storages that do not fit."""
    free_bytes, _ = torch.cuda.mem_get_info(gpu)
    return DeviceMemoryError(
        f"cuda:{gpu} has {free_bytes} bytes free, {needed_bytes} are needed to resume",
        "let another job be suspended first, then resume again; the snapshot is kept",
    )
