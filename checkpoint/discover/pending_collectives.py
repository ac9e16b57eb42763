"""Collectives started with ``async_op=True`` that are not complete, so that their buffers are in use.

At a boundary with a pending collective the job is not suspended. gloo may be writing a buffer in a thread of
its own. Another rank may reach the collective only after a boundary of its own, so waiting would deadlock.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import torch.distributed

from gpuslice.errors import SuspendRefusedError, hide_own_frames

#: Methods of a process group that return a ``Work``. ``async_op=False`` calls them, too, and waits at once.
_STARTS = (
    *("_allgather_base", "_end_coalescing", "_reduce_scatter_base", "all_gather_single"),
    *("all_gather_single_coalesced", "all_to_all_single", "allgather", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base"),
    *("barrier", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("scatter", "send"),
)
REMEDY = "wait for the work that async_op=True returns before the next mini-batch begins"
#: How long a boundary waits for collectives that all ranks have reached.
_SETTLE_S = 0.1
_LOOK_AGAIN_S = 1e-3

#: Collectives without a wait, by identity. The script may have dropped them; they run nevertheless.
_started: dict[int, torch.distributed.Work] = {}
#: First and last time at which `pending` returned True, if it did so at every call in between.
_in_vain_s: tuple[float, float] | None = None
#: A longer gap between two calls means that boundaries in between made no check.
_IN_A_ROW_S = 10.0


@functools.cache
def track() -> None:
    """Begin to record the collectives that this process starts, in any group."""
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
    """Return True if some collectives are not complete at this moment."""
    if not torch.distributed.is_available():
        return False
    from torch._C._distributed_c10d import _get_work_registry_size

    _forget_completed()
    return bool(_started) or _get_work_registry_size() > 0


def pending() -> bool:
    """Return True if some collectives are not complete after a short wait.

    It never waits for a rank that does not come. After one wait in vain it does not wait again until it has
    once found none pending.
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
    """Return for how many seconds every check has found a pending collective; 0 without a recent check."""
    in_vain_s = _in_vain_s
    if in_vain_s is None or time.monotonic() - in_vain_s[1] >= _IN_A_ROW_S:
        return 0.0
    return in_vain_s[1] - in_vain_s[0]


def refuse() -> None:
    """Raise ``SuspendRefusedError`` if a collective is pending."""
    if pending():
        raise SuspendRefusedError("a collective of torch.distributed is pending", REMEDY)
