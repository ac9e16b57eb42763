"""Who runs and who waits, by priority (``policies/ranking.py``)."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

from .arrays import FLIPPED, FREE, JOINING, NEXT, ORDER, WAITING, World, compiled, inlined, urgent
from .heaps import pull, push
from .keys import executed_at, index_at, set_key
from .rules import ANYWHERE, FULLEST, GITTINS, PUBLISHED_GITTINS, PUBLISHED_SHORTEST

#: A key for one job takes as long as keys for so many of all that run.
_FEW = 32
#: What sums of times may be wrong by, as a part of them.
_ROUNDING = 1e-9


@inlined
def first_of(w: World, job: int) -> float:
    """Return a running job's first sort value: its key, less what others may have grown by since.

    So of whoever has an old key it is never less than by a key of the present: who is last by keys of the
    present is found by giving one to whoever is last, until that one had it before (``at_present``).
    """
    return float(w.jobs[job].key[0] - w.clock[0].pace * w.jobs[job].keyed)


@inlined
def position(w: World, job: int) -> int:
    """Return how many running jobs come before ``job``."""
    order, firsts, first = w.slots[ORDER], w.firsts[ORDER], first_of(w, job)
    low, high = 0, w.clock[0].count
    while low < high:
        middle = (low + high) // 2
        other = firsts[middle]
        if other < first if other != first else urgent(w, order[middle], job):
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def ahead(w: World, place: int, job: int) -> bool:
    """Return True if the job that runs at ``place`` certainly comes before the waiting ``job``."""
    first, other = w.firsts[ORDER, place], w.jobs[job].key[0] - w.clock[0].pace * w.clock[0].now
    return bool(first < other if first != other else urgent(w, w.slots[ORDER, place], job))


@inlined
def shift(row: Any, at: int, until: int, by: int) -> None:
    """Move the entries from ``at`` up to ``until`` one place up or, with ``by`` below 0, down.

    Places that cannot be negative let it be compiled to a single move.
    """
    one, first, last = np.uintp(1), np.uintp(at), np.uintp(until)
    if by > 0:
        while last > first:
            row[last] = row[last - one]
            last -= one
    else:
        while first < last:
            row[first - one] = row[first]
            first += one


@compiled
def rank(w: World, job: int) -> None:
    """Insert ``job`` by its up-to-date key (``Ranking.add``)."""
    j, clock = w.jobs[job], w.clock[0]
    if not j.runs:
        push(w, WAITING, job)
        return
    j.keyed = clock.now
    at = position(w, job)
    shift(w.slots[ORDER], at, clock.count, 1)
    shift(w.firsts[ORDER], at, clock.count, 1)
    w.slots[ORDER, at], w.firsts[ORDER, at] = job, first_of(w, job)
    clock.fresh += at < clock.fresh
    clock.count += 1
    clock.free -= j.demand


@compiled
def unrank(w: World, job: int) -> None:
    """Remove ``job`` before its key changes (``Ranking.remove``)."""
    j, clock = w.jobs[job], w.clock[0]
    if not j.runs:
        pull(w, WAITING, job)
        return
    at = position(w, job)
    shift(w.slots[ORDER], at + 1, clock.count, -1)
    shift(w.firsts[ORDER], at + 1, clock.count, -1)
    clock.fresh -= at < clock.fresh
    clock.count -= 1
    clock.free += j.demand


@compiled
def rekey(w: World, job: int, now: float) -> None:
    unrank(w, job)
    set_key(w, job, now)
    rank(w, job)


@compiled
def order_anew(w: World) -> None:
    """Sort the running jobs, which are nearly sorted, by changed keys."""
    order, firsts = w.slots[ORDER], w.firsts[ORDER]
    for i in range(w.clock[0].count):
        job, first, at = order[i], first_of(w, order[i]), i
        while at > 0 and (
            first < firsts[at - 1] if first != firsts[at - 1] else urgent(w, job, order[at - 1])
        ):
            order[at], firsts[at] = order[at - 1], firsts[at - 1]
            at -= 1
        order[at], firsts[at] = job, first


@compiled
def refresh(w: World) -> None:
    """Compute up-to-date keys of running jobs, in orders that shift as jobs run (``Ranking.refresh``).

    Who was started at this very moment has one.
    """
    clock, now = w.clock[0], w.clock[0].now
    kind = clock.kind
    clock.expired, clock.fresh = False, 0
    for place in range(clock.count):
        job = w.slots[ORDER, place]
        key, old = w.jobs[job].key, w.jobs[job].key[0]
        w.jobs[job].keyed = now
        if kind == PUBLISHED_GITTINS:
            key[1], key[3], key[4] = -index_at(w, job, now), 0, place
        elif kind == PUBLISHED_SHORTEST:
            remaining = w.jobs[job].duration - executed_at(w, job, now)
            key[0] = remaining * (w.jobs[job].demand if clock.by_devices else 1)
            if key[0] != old:
                key[1], key[2], key[3] = clock.events + 1, 1, place
        elif w.jobs[job].running and (kind != GITTINS or w.jobs[job].level < clock.queues):
            set_key(w, job, now)
    order_anew(w)


@inlined
def uncertain(w: World, place: int) -> bool:
    """Return True if another job may be at ``place`` by up-to-date keys. All behind ``place`` are certain."""
    clock, firsts = w.clock[0], w.firsts[ORDER]
    if clock.kind == GITTINS:
        return bool(w.jobs[w.slots[ORDER, place]].level < clock.queues)  # in the last queue keys stay
    if clock.fresh == 0:
        return False
    first, before = firsts[place], firsts[clock.fresh - 1]
    tiny = _ROUNDING * (1.0 + abs(first) + clock.pace * clock.now)
    return bool(clock.fresh > place or before + tiny >= first)


@inlined
def at_present(w: World, place: int) -> int:
    """Return the job at ``place`` by up-to-date keys, after all behind it (``Ranking._backwards``)."""
    if w.clock[0].expired and uncertain(w, place):
        make_certain(w, place)
    return int(w.slots[ORDER, place])


@compiled
def make_certain(w: World, place: int) -> None:
    """Compute up-to-date keys of the jobs that may be at ``place`` or behind it; of all if these are many."""
    clock, few = w.clock[0], w.clock[0].count // _FEW
    while clock.expired and uncertain(w, place):
        job = w.slots[ORDER, clock.fresh - 1]
        if few == 0 or clock.kind == GITTINS:
            refresh(w)
        elif w.jobs[job].keyed == clock.now:
            clock.fresh -= 1
        else:
            few -= 1
            rekey(w, job, clock.now)


@compiled
def sort(w: World, row: int, count: int, by_key: bool) -> None:
    """Sort the first ``count`` jobs of a list, few or nearly sorted, by key or by number."""
    jobs = w.slots[row]
    for i in range(1, count):
        job, at = jobs[i], i
        while at > 0 and (urgent(w, job, jobs[at - 1]) if by_key else job < jobs[at - 1]):
            jobs[at] = jobs[at - 1]
            at -= 1
        jobs[at] = job


@compiled
def fits(w: World, job: int) -> bool:
    """Return True if ``job`` fits once everything less urgent gives way (``Ranking._fits``)."""
    left, i = w.clock[0].free, w.clock[0].count
    while left < w.jobs[job].demand:
        i -= 1
        if i < 0:
            return False
        last = at_present(w, i)
        if ahead(w, i, job):
            return False
        left += w.jobs[last].demand
    return True


@compiled
def next_start(w: World) -> int:
    """Return the most urgent waiting job that fits behind everything more urgent, or -1 (``_next_start``)."""
    best, clock = -1, w.clock[0]
    for row in range(clock.groups):
        if w.groups[row].filled and not w.groups[row].blocked:
            head = int(w.slots[WAITING, w.groups[row].start])
            if (best < 0 or urgent(w, head, best)) and (clock.strict or fits(w, head)):
                best = head
    return -1 if best >= 0 and clock.strict and not fits(w, best) else best


@compiled
def place(w: World, job: int) -> bool:
    """Give ``job`` nodes. Return True if there were enough (``Consolidated.choose``, ``PublishedYarn``)."""
    j, clock, free = w.jobs[job], w.clock[0], w.nodes[FREE]
    if clock.placing == ANYWHERE:
        return True
    whole, rest = j.demand // clock.node_size, j.demand % clock.node_size
    empty, best = 0, -1
    for node in range(len(free)):
        if free[node] == clock.node_size and empty < whole:
            empty += 1
        elif free[node] >= rest and (best < 0 or (clock.placing == FULLEST and free[node] < free[best])):
            best = node
    if empty < whole or (rest and best < 0):
        return False
    j.whole, j.rest = -1, best if rest else -1
    for node in range(len(free)):
        if whole and free[node] == clock.node_size:
            free[node], w.nodes[NEXT, node] = 0, j.whole
            j.whole = node
            whole -= 1
    if rest:
        free[best] -= rest
    return True


@compiled
def vacate(w: World, job: int) -> None:
    """Give back the nodes of ``job``, which leaves."""
    j, clock = w.jobs[job], w.clock[0]
    if clock.placing == ANYWHERE:
        return
    node = j.whole
    while node >= 0:
        w.nodes[FREE, node] = clock.node_size
        node = w.nodes[NEXT, node]
    if j.rest >= 0:
        w.nodes[FREE, j.rest] += j.demand % clock.node_size
    j.whole = j.rest = -1


@compiled
def flip(w: World, job: int) -> None:
    """Start ``job`` if it waits, and suspend it if it runs."""
    clock = w.clock[0]
    unrank(w, job)
    w.jobs[job].runs = not w.jobs[job].runs
    rank(w, job)
    if not w.jobs[job].touched:
        w.jobs[job].touched = True
        w.slots[FLIPPED, clock.flipped] = job
        clock.flipped += 1


@compiled
def repair(w: World) -> None:
    """Run exactly the jobs that the greedy walk admits and that can be placed (``Ranking.repair``).

    Nodes are looked at only under policies that suspend nobody.
    """
    clock = w.clock[0]
    for row in range(clock.groups):
        w.groups[row].blocked = False
    while True:
        job = next_start(w)
        if clock.free < 0:
            left, i = clock.free, clock.count
            while left < 0:
                i -= 1
                left += w.jobs[at_present(w, i)].demand
            if job < 0 or urgent(w, w.slots[ORDER, i], job):
                job = int(w.slots[ORDER, i])
        elif job >= 0 and not place(w, job):
            w.groups[w.jobs[job].group].blocked = True
            if clock.strict:
                return
            continue
        if job < 0:
            return
        flip(w, job)


@compiled
def spare(w: World, now: float) -> None:
    """Do as ``repair``, but suspend no job whose slice is too short yet (``RankedPolicy._spare``)."""
    clock, order, young, count = w.clock[0], w.slots[ORDER], w.slots[JOINING], 0
    clock.spared_s = inf
    if clock.sparing and clock.least_s > 0 and crowded(w):
        if clock.expired:
            refresh(w)
        for i in range(clock.count):
            j = w.jobs[order[i]]
            if j.since + clock.least_s > now:
                clock.spared_s = min(clock.spared_s, j.since + clock.least_s)
                young[count] = order[i]
                count += 1
    for i in range(count):
        j = w.jobs[young[i]]
        for column in range(5):
            j.own[column] = j.key[column]
        j.key[0], j.key[1] = -inf, young[i]
    if count:
        order_anew(w)
    repair(w)
    for i in range(count):
        j = w.jobs[young[i]]
        for column in range(5):
            j.key[column] = j.own[column]
    if count:
        order_anew(w)


@compiled
def crowded(w: World) -> bool:
    """Return True if any job waits."""
    return bool(w.clock[0].alive > w.clock[0].count)
