"""Collectives that were started with ``async_op=True`` and are not complete: their buffers are in use.

At a boundary with one of these the job is not suspended. gloo may be writing a buffer in a thread of its
own. The other rank may come to the collective only after a boundary of its own, so nobody waits for it there.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import torch.distributed

from gpuslice.errors import SuspendRefusedError, hide_own_frames

#: What of a process group returns a ``Work``. Also ``async_op=False`` comes here, and waits right away.
_STARTS = (
    *("_allgather_base", "_end_coalescing", "_reduce_scatter_base", "all_gather_single"),
    *("all_gather_single_coalesced", "all_to_all_single", "allgather", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base"),
    *("barrier", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("scatter", "send"),
)
REMEDY = "wait for the work that async_op=True returns before the next mini-batch begins"
#: So long a boundary waits for those that all ranks have come to.
_SETTLE_S = 0.1
_LOOK_AGAIN_S = 1e-3

#: By identity, those that nobody has waited for. The script may have dropped them; they run nevertheless.
_started: dict[int, torch.distributed.Work] = {}
#: When `pending` was asked in vain, first and last, and not otherwise in between.
_in_vain_s: tuple[float, float] | None = None
#: Beyond that, nobody has asked at the boundaries in between.
_IN_A_ROW_S = 10.0


@functools.cache
def track() -> None:
    """From now on notice the collectives that this process starts, by whatever group."""
    group = torch.distributed.ProcessGroup
    for name in _STARTS:
        if hasattr(group, name):
            setattr(group, name, _noting(getattr(group, name)))
    wait = torch.distributed.Work.wait

    @functools.wraps(wait)
    def waited(work: torch.distributed.Work, *args: Any, **kwargs: Any) -> Any:
        try:
            result = wait(work, *args, **kwargs)
        except BaseException as error:
            hide_own_frames(error)
            raise
        _started.pop(id(work), None)
        return result

    torch.distributed.Work.wait = waited  # type: ignore[method-assign, assignment]
    os.register_at_fork(after_in_child=_started.clear)  # a child has none of gloo's threads


def _noting(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def started(*args: Any, **kwargs: Any) -> Any:
        try:
            work = start(*args, **kwargs)
        except BaseException as error:
            hide_own_frames(error)
            raise
        if _started:
            _forget_completed()
        if work is not None:
            _started[id(work)] = work
        return work

    return started


def _forget_completed() -> None:
    for key, work in list(_started.items()):
        if work.is_completed():
            _started.pop(key, None)


def unfinished() -> bool:
    """Whether some are not complete at this moment."""
    if not torch.distributed.is_available():
        return False
    from torch._C._distributed_c10d import _get_work_registry_size

    _forget_completed()
    return bool(_started) or _get_work_registry_size() > 0


def pending() -> bool:
    """Whether some are not complete, a moment granted. Never waits for a rank that does not come.

    After it has waited in vain once, it does not wait again until it was asked when there was none.
    """
    global _in_vain_s
    now_s = time.monotonic()
    ends_s = now_s + (0.0 if _in_vain_s else _SETTLE_S)
    while unfinished():
        if now_s >= ends_s:
            first_s, last_s = _in_vain_s or (now_s, now_s)
            _in_vain_s = (first_s if now_s - last_s < _IN_A_ROW_S else now_s), now_s
            return True
        time.sleep(_LOOK_AGAIN_S)
        now_s = time.monotonic()
    _in_vain_s = None
    return False


def pending_for_s() -> float:
    """For how long there were some whenever somebody asked; 0 if nobody has asked of late."""
    in_vain_s = _in_vain_s
    if in_vain_s is None or time.monotonic() - in_vain_s[1] >= _IN_A_ROW_S:
        return 0.0
    return in_vain_s[1] - in_vain_s[0]


def refuse() -> None:
    """Refuse a suspend while some are not complete: ``SuspendRefusedError``."""
    if pending():
        raise SuspendRefusedError("a collective of torch.distributed is pending", REMEDY)
