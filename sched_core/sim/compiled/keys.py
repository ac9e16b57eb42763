"""What each order goes by: the keys of jobs.

Each function is the counterpart of the method that its docstring names, over ``arrays.World``.
"""

from __future__ import annotations

from math import inf
from typing import Any

from .arrays import World, compiled, inlined
from .rules import (
    ATTAINED,
    EXPECTED,
    FIRST,
    GITTINS,
    PUBLISHED_GITTINS,
    PUBLISHED_QUEUES,
    PUBLISHED_SHORTEST,
    QUEUES,
    REMAINING,
    SHORTEST,
    SMALLEST,
    TURNS,
)

#: Added to the turns of those who have not begun their slice (``rr``): more than there can be turns.
NEXT_ROUND = 2.0**50


@inlined
def executed_at(w: World, job: int, now: float) -> float:
    j = w.jobs[job]
    return float(j.executed + (now - j.since) if j.running and now > j.since else j.executed)


@inlined
def attained_at(w: World, job: int, now: float) -> float:
    """Return the service or time that counts in queues and for ``las``, since the first queue was entered."""
    j = w.jobs[job]
    if not w.clock[0].by_devices:
        return float(executed_at(w, job, now) - j.base_executed)
    service = j.service + (now - j.since) * j.demand if j.running and now > j.since else j.service
    return float(service - j.base_service)


@compiled
def up_to(samples: Any, value: float) -> int:
    """Return how many of the ascending ``samples`` are at most ``value``."""
    low, high = 0, len(samples)
    while low < high:
        middle = (low + high) // 2
        if samples[middle] <= value:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def index_at(w: World, job: int, now: float) -> float:
    """Return ``PublishedIndex.at``, or ``GittinsIndex.within`` up to the end of the queue."""
    clock = w.clock[0]
    samples = w.numbers[clock.queues : clock.queues + clock.samples]
    table = w.numbers[clock.queues + clock.samples :]
    attained = attained_at(w, job, now)
    first = up_to(samples, attained)
    if clock.kind == PUBLISHED_GITTINS:
        return float(table[first]) if first < len(table) else 0.0
    if w.jobs[job].level == clock.queues:
        return 0.0
    more = w.numbers[w.jobs[job].level] - attained
    beyond = up_to(samples, attained + more)
    if more <= 0 or first == beyond:
        return 0.0
    completing = beyond - first
    used = table[beyond] - table[first] - completing * attained
    return float(completing / (used + more * (len(samples) - beyond)))


@compiled
def set_key(w: World, job: int, now: float) -> None:
    """Set the job's key as ``waiting_key`` of its order does, and what else running jobs need."""
    j, key, clock = w.jobs[job], w.jobs[job].key, w.clock[0]
    kind = clock.kind
    if kind == FIRST:
        key[0] = not j.runs
    elif kind == SMALLEST:
        key[0] = j.demand
    elif kind == SHORTEST:
        key[0], key[1] = not j.runs, 0.0 if j.runs else j.duration
    elif kind in (REMAINING, PUBLISHED_SHORTEST):
        key[0] = (j.duration - executed_at(w, job, now)) * (j.demand if clock.by_devices else 1)
        key[1] = not j.runs
        if kind == PUBLISHED_SHORTEST:
            key[1], key[2], key[3] = clock.events + 1, 2, job
    elif kind == ATTAINED:
        key[0] = attained_at(w, job, now)
    elif kind == TURNS:
        clock.turn += 1
        key[0] = NEXT_ROUND + clock.turn
    elif kind == EXPECTED:
        clock.turn += 1
        clock.newest, clock.newest_s = job, now
        key[0], key[1] = w.numbers[clock.samples], clock.turn
    elif kind in (QUEUES, GITTINS):
        key[0], key[2] = j.level, j.started == inf
        key[1] = -index_at(w, job, now) if kind == GITTINS else 0.0
        key[3] = j.entered if j.started == inf else j.started
    elif kind >= PUBLISHED_QUEUES:
        clock.turn += 1
        key[0], key[3], key[4] = j.level, 1, clock.turn
        if kind == PUBLISHED_GITTINS:
            key[1], key[2] = -index_at(w, job, now), j.submit
