"""Heaps of jobs: those that wait, by key, one heap for each demand; and three more, by time."""

from __future__ import annotations

from .arrays import ENDING, WAITING, World, compiled, inlined, urgent


@inlined
def before(w: World, kind: int, first: float, one: int, other_first: float, other: int) -> bool:
    """Return True if job ``one`` comes before ``other`` in heaps of ``kind``, ordered by ``first`` first."""
    if first != other_first:
        return first < other_first
    return urgent(w, one, other) if kind == WAITING else one < other


@compiled
def sift(w: World, kind: int, row: int, at: int) -> None:
    """Move the job at position ``at`` of the heap of ``w.groups[row]`` to where it belongs."""
    start, filled = w.groups[row].start, w.groups[row].filled
    heap, firsts = w.slots[kind], w.firsts[kind]
    job, first = heap[start + at], firsts[start + at]
    while at > 0:
        above = start + (at - 1) // 2
        if not before(w, kind, first, job, firsts[above], heap[above]):
            break
        move(w, kind, above, start, at)
        at = (at - 1) // 2
    while 2 * at + 1 < filled:
        child = start + 2 * at + 1
        if 2 * at + 2 < filled and before(
            w, kind, firsts[child + 1], heap[child + 1], firsts[child], heap[child]
        ):
            child += 1
        if not before(w, kind, firsts[child], heap[child], first, job):
            break
        move(w, kind, child, start, at)
        at = child - start
    heap[start + at], firsts[start + at] = job, first
    w.jobs[job].at[kind] = at


@inlined
def move(w: World, kind: int, source: int, start: int, at: int) -> None:
    """Move the job in slot ``source`` to position ``at`` of the heap that begins at ``start``."""
    job = w.slots[kind, source]
    w.slots[kind, start + at], w.firsts[kind, start + at] = job, w.firsts[kind, source]
    w.jobs[job].at[kind] = at


@compiled
def push(w: World, kind: int, job: int) -> None:
    """Add ``job``, which is not in the heap of ``kind``, to it."""
    j = w.jobs[job]
    row = j.group if kind == WAITING else w.clock[0].groups + kind - 1
    group = w.groups[row]
    slot = group.start + group.filled
    w.slots[kind, slot] = job
    w.firsts[kind, slot] = j.key[0] if kind == WAITING else j.end if kind == ENDING else j.due
    group.filled += 1
    sift(w, kind, row, group.filled - 1)


@compiled
def pull(w: World, kind: int, job: int) -> None:
    """Remove ``job`` from its heap of ``kind``, if it is in it.

    Its keys must not have changed.
    """
    at = w.jobs[job].at[kind]
    if at < 0:
        return
    row = w.jobs[job].group if kind == WAITING else w.clock[0].groups + kind - 1
    group = w.groups[row]
    w.jobs[job].at[kind] = -1
    group.filled -= 1
    if at < group.filled:
        move(w, kind, group.start + group.filled, group.start, at)
        sift(w, kind, row, at)


@compiled
def top(w: World, kind: int) -> int:
    """Return the first job of the heap of ``kind``, or -1."""
    group = w.groups[w.clock[0].groups + kind - 1]
    return int(w.slots[kind, group.start]) if group.filled else -1
