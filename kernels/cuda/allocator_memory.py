"""Memory of torch's CUDA allocator for storages: all of it or none, and what the allocator says of it.

The caching allocator asks CUDA for a segment for each large tensor, and rounds it up to 2 MiB. A state that
comes back whole would come back so, and might not fit any more. So room is made for many storages at a time:
a segment is taken and handed back to the allocator, which then divides it among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from itertools import groupby, islice
from typing import Any

import torch

from gpuslice.errors import DeviceMemoryError

from . import runtime_calls

#: One segment for many storages has about this many bytes.
SEGMENT_BYTES = 512 << 20
#: The allocator gives smaller storages a share of segments anyway.
_LARGE_BYTES = 10 << 20
#: What it rounds sizes to.
_ROUNDED_BYTES = 512


def statistics(ask: Callable[[], Any]) -> Any:
    """What the allocator says of itself, or ``None``: one that is not torch's own may keep no count."""
    try:
        return ask()
    except (RuntimeError, NotImplementedError):
        return None


def held_by_gpu() -> tuple[int, list[int]] | None:
    """The current GPU, and the bytes of live tensors on each; ``None`` if this process has not begun CUDA.

    An allocator that keeps no count is taken to hold one byte on the current GPU.
    """
    counts = _counts()
    if not counts:
        return None
    current = torch.cuda.current_device()
    return current, [int(gpu == current) if count is None else count for gpu, count in enumerate(counts)]


def held_elsewhere(index: int) -> dict[int, int]:
    """Bytes of live tensors on every GPU that holds some, but for one; of any thread's asking."""
    return {gpu: count for gpu, count in enumerate(_counts()) if count and gpu != index}


def _counts() -> list[int | None]:
    """Bytes of live tensors on each GPU as far as they are counted; none before this process begins CUDA."""
    gpus = range(torch.cuda.device_count()) if runtime_calls.has_begun() else ()
    return [statistics(functools.partial(torch.cuda.memory_allocated, gpu)) for gpu in gpus]


def segments(gpus: Collection[int]) -> list[dict[str, Any]]:
    """Segments of these GPUs by the native allocator; none by any other."""
    if torch.cuda.get_allocator_backend() != "native":
        return []
    found = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return [segment for segment in found if segment["device"] in gpus]


def graph_pools_bytes(gpus: Collection[int]) -> int:
    """Of these GPUs' segments, those in pools of their own: of recorded graphs, or of a ``MemPool``."""
    shared = (0, 0)
    return sum(
        segment["total_size"]
        for segment in segments(gpus)
        if tuple(segment.get("segment_pool_id", shared)) != shared
    )


def in_segments(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes in their order, divided: how many follow each other, and the segment's bytes, or 0 for none."""
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
    """Have the allocator hold a free segment of so many bytes for what is asked for next, if there is one."""
    if nbytes and torch.cuda.get_allocator_backend() == "native":
        try:
            torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return  # smaller ones may be there


def fill_up(wanted: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
    """Give storages of one GPU these sizes in bytes, with room made for many at a time."""
    ahead = iter(wanted)
    for count, segment_bytes in in_segments([nbytes for _, nbytes in wanted]):
        make_room(segment_bytes, wanted[0][0].device)
        for storage, nbytes in islice(ahead, count):
            storage.resize_(nbytes)


def lack_of_memory(gpu: int, needed_bytes: int) -> DeviceMemoryError:
    """The error for storages that do not fit."""
    free_bytes, _ = torch.cuda.mem_get_info(gpu)
    return DeviceMemoryError(
        f"cuda:{gpu} has {free_bytes} bytes free, {needed_bytes} are needed to resume",
        "let another job be suspended first, then resume again; the snapshot is kept",
    )
