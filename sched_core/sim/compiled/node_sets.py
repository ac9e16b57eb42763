"""The published ``gandiva`` over arrays (``policies/published/gandiva.py``): jobs of a node set take turns.

Which nodes a set has makes no difference to when jobs run, so nodes are only counted.
"""

from __future__ import annotations

from math import ceil, floor, inf, isnan
from typing import Any, NamedTuple

import numpy as np

from gpuslice.sched_core.policies.published.gandiva import TICK_S, TURN_S

from .arrays import JOINING, PENDING, STARTED, SUSPENDED, World, compiled
from .loop import MORE, OVER, STUCK, carry_out, next_instant, process_arrivals_and_ends

#: A node set: nodes it has, none if there is no such set; its jobs, the first ``capacity`` of which run.
SET = np.dtype(
    [(name, np.int64) for name in ("nodes", "capacity", "load", "count", "head", "tail")], align=True
)


class Sets(NamedTuple):
    """All node sets.

    Attributes
    ----------
    sets
        Records; one more than there are nodes, so that there is always a free one to look at.
    lists
        The sets of each row of ``World.groups``, in order.
    noted
        What everything was like before a tick.
    """

    sets: Any
    lists: Any
    noted: Any


def advance_sets(w: World, n: Sets, events: int) -> int:
    """Simulate so many events, as ``loop.advance`` does."""
    clock = w.clock[0]
    while clock.arrived < len(w.jobs) or clock.alive:
        if events == 0:
            return MORE
        events -= 1
        now = next_look(w)
        if now == inf:
            return STUCK
        came, ended = clock.arrived, clock.arrived - clock.alive
        process_arrivals_and_ends(w, now)
        take_turns(w, n, now, came, clock.arrived - clock.alive > ended)
        carry_out(w, now)
        if clock.wake <= now:
            return STUCK
    return OVER


@compiled
def next_look(w: World) -> float:
    """Return the next arrival, or the tick at which a change is seen (``Ticks._next_instant``)."""
    clock, next_s = w.clock[0], next_instant(w)
    arrival = w.jobs[clock.arrived].submit if clock.arrived < len(w.jobs) else inf
    if next_s in (arrival, clock.wake):
        return float(next_s)
    seen = clock.now + max(1, ceil((next_s - clock.now) / TICK_S)) * TICK_S
    return float(min(arrival, seen, clock.wake))


@compiled
def take_turns(w: World, n: Sets, now: float, came: int, gone: bool) -> None:
    """List the jobs that one tick starts and suspends (``PublishedGandiva.plan``).

    Jobs from number ``came`` on have arrived since the last one; ``gone``: some have ended.
    """
    clock = w.clock[0]
    changed = gone or came < clock.arrived
    if not changed:
        picture(w, n, False)
    turned, released = end(w, n, now % TURN_S == 0)
    for job in range(came, clock.arrived):
        if not join(w, n, job, now):
            w.slots[PENDING, clock.pending] = job
            clock.pending += 1
    if released:
        retry(w, n, now)
    adjust(w, n)
    waiting = decide_turns(w, n)
    clock.wake = now + TICK_S
    if clock.alive == 0:
        clock.wake = inf
    elif not changed and not turned and picture(w, n, True):
        clock.wake = inf if not waiting or now % TICK_S else now + TURN_S - now % TURN_S


@compiled
def picture(w: World, n: Sets, compare: bool) -> bool:
    """Record everything on which the next tick depends.

    With ``compare`` return True if it is as recorded (``_picture``).
    """
    length, same = 0, True
    for place in range(w.clock[0].sizes):
        row = int(w.numbers[place])
        for i in range(w.groups[row].sets):
            one = n.sets[n.lists[row, i]]
            length, same = mark(w, n, length, one.nodes, compare, same)
            length, same = mark(w, n, length, one.load, compare, same)
            job = one.head
            while job >= 0:
                length, same = mark(w, n, length, job, compare, same)
                job = w.jobs[job].after
            length, same = mark(w, n, length, -1, compare, same)
    for i in range(w.clock[0].pending):
        length, same = mark(w, n, length, int(w.slots[PENDING, i]), compare, same)
    length, same = mark(w, n, length, -2, compare, same)
    return same


@compiled
def mark(w: World, n: Sets, length: int, value: int, compare: bool, same: bool) -> tuple[int, bool]:
    if compare:
        return length + 1, same and n.noted[length] == value
    n.noted[length] = value
    return length + 1, same


@compiled
def append(w: World, n: Sets, number: int, job: int) -> None:
    """Append ``job`` to those that take turns in a set, without counting it as load."""
    one = n.sets[number]
    w.jobs[job].after = -1
    if one.head < 0:
        one.head = job
    else:
        w.jobs[one.tail].after = job
    one.tail = job
    one.count += 1


@compiled
def end(w: World, n: Sets, turn: bool) -> tuple[bool, bool]:
    """Give turns and remove ended jobs (``_end``).

    Return whether a turn was over, and whether nodes became free.
    """
    clock = w.clock[0]
    turned = released = False
    for place in range(clock.sizes):
        group = w.groups[int(w.numbers[place])]
        sets, kept = n.lists[int(w.numbers[place])], 0
        for i in range(group.sets):
            number = int(sets[i])
            one = n.sets[number]
            if turn and one.count > one.capacity:
                turned = True
                for _ in range(one.capacity):
                    job = one.head
                    one.head = w.jobs[job].after
                    one.count -= 1
                    append(w, n, number, job)
            job = one.head
            one.head, one.count = -1, 0
            while job >= 0:
                after = w.jobs[job].after
                if isnan(w.jobs[job].finish):
                    append(w, n, number, job)
                job = after
            if one.count:
                sets[kept] = number
                kept += 1
            else:
                dissolve(w, n, number)
                released = True
        group.sets = kept
    return turned, released


@compiled
def new_set(w: World, n: Sets, row: int) -> int:
    """Add a set for jobs of the size of ``row`` at the end of the list. Return it, or -1 without nodes."""
    clock, group = w.clock[0], w.groups[row]
    nodes = ceil(group.demand / clock.node_size)
    if nodes > clock.idle_nodes:
        return -1
    number = 0
    while n.sets[number].nodes:
        number += 1
    one = n.sets[number]
    one.nodes, one.capacity = nodes, nodes * clock.node_size // group.demand
    one.load, one.count, one.head = 0, 0, -1
    n.lists[row, group.sets] = number
    group.sets += 1
    clock.idle_nodes -= nodes
    return number


@compiled
def dissolve(w: World, n: Sets, number: int) -> None:
    w.clock[0].idle_nodes += n.sets[number].nodes
    n.sets[number].nodes = 0


@compiled
def first_goes_last(w: World, n: Sets, row: int) -> None:
    sets, count = n.lists[row], w.groups[row].sets
    first = sets[0]
    for i in range(1, count):
        sets[i - 1] = sets[i]
    sets[count - 1] = first


@compiled
def sort_sets(w: World, n: Sets, row: int) -> None:
    """Sort the sets, least loaded first; equals keep their order."""
    sets = n.lists[row]
    for i in range(1, w.groups[row].sets):
        number, at = sets[i], i
        while at > 0 and n.sets[sets[at - 1]].load > n.sets[number].load:
            sets[at] = sets[at - 1]
            at -= 1
        sets[at] = number


@compiled
def join(w: World, n: Sets, job: int, now: float) -> bool:
    """Find a set for ``job``. Return False if it has to wait (``_join``)."""
    row = w.jobs[job].group
    group, sets = w.groups[row], n.lists[row]
    if group.sets:
        first_goes_last(w, n, row)
    last = n.sets[sets[max(group.sets - 1, 0)]]
    if (group.sets == 0 or last.load + 1 >= last.capacity) and new_set(w, n, row) < 0:
        if group.sets == 0:
            return False
        first_goes_last(w, n, row)
    number = int(sets[group.sets - 1])
    append(w, n, number, job)
    n.sets[number].load += 1
    sort_sets(w, n, row)
    w.jobs[job].started = now
    return True


@compiled
def retry(w: World, n: Sets, now: float) -> None:
    """Let waiting jobs join, passing over the job after each that joins (``_retry``)."""
    clock, pending = w.clock[0], w.slots[PENDING]
    kept, follows = 0, False
    for i in range(clock.pending):
        job = int(pending[i])
        follows = not follows and join(w, n, job, now)
        if not follows:
            pending[kept] = job
            kept += 1
    clock.pending = kept


@compiled
def adjust(w: World, n: Sets) -> None:
    """Give every size sets in proportion to what its jobs ask for (``_adjust``)."""
    clock, total = w.clock[0], 0
    for place in range(clock.sizes):
        row = int(w.numbers[place])
        group = w.groups[row]
        group.wanted = 0
        for i in range(group.sets):
            group.wanted += group.demand * n.sets[n.lists[row, i]].count
        total += group.wanted
    for place in range(clock.sizes):
        row = int(w.numbers[place])
        group, nodes = w.groups[row], 0
        if group.wanted:
            for i in range(group.sets):
                nodes += n.sets[n.lists[row, i]].nodes
            share = floor(group.wanted / total * clock.capacity)
            more = min(share, group.wanted) - clock.node_size * nodes
            if more > 0:
                expand(w, n, row, ceil(more / group.demand))
            elif more < 0:
                shrink(w, n, row, ceil(-more / group.demand))


@compiled
def expand(w: World, n: Sets, row: int, count: int) -> None:
    """Add up to ``count`` sets, and deal jobs out anew where the peer does (``_expand``)."""
    nodes, rearranged = ceil(w.groups[row].demand / w.clock[0].node_size), 0
    for number in range(1, count + 1):
        rearranged = number if new_set(w, n, row) < 0 else nodes - 1
    if not rearranged:
        return
    jobs = 0
    for i in range(w.groups[row].sets):
        one = n.sets[n.lists[row, i]]
        if one.count:
            jobs = collect(w, n, one, jobs)
            one.load = 0
    hand_out(w, n, row, jobs)


@compiled
def shrink(w: World, n: Sets, row: int, count: int) -> None:
    """Dissolve the first ``count`` sets, keeping at least one (``_shrink``)."""
    group, sets, jobs = w.groups[row], n.lists[row], 0
    count = min(count, group.sets - 1)
    for i in range(count):
        jobs = collect(w, n, n.sets[sets[i]], jobs)
        dissolve(w, n, int(sets[i]))
    group.sets -= count
    for i in range(group.sets):
        sets[i] = sets[i + count]
    hand_out(w, n, row, jobs)


@compiled
def collect(w: World, n: Sets, one: Any, jobs: int) -> int:
    """Take all jobs of a set and list them behind the ``jobs`` listed so far. Return their number."""
    job = one.head
    while job >= 0:
        w.slots[JOINING, jobs] = job
        jobs += 1
        job = w.jobs[job].after
    one.head, one.count = -1, 0
    return jobs


@compiled
def hand_out(w: World, n: Sets, row: int, jobs: int) -> None:
    """Give the listed jobs, one by one, to the least loaded set (``_hand_out``)."""
    for i in range(jobs):
        number = int(n.lists[row, 0])
        append(w, n, number, int(w.slots[JOINING, i]))
        n.sets[number].load += 1
        sort_sets(w, n, row)


@compiled
def decide_turns(w: World, n: Sets) -> bool:
    """List the jobs to start and suspend.

    Return True if one waits for a turn (``_target``, ``difference``).
    """
    clock, waiting = w.clock[0], False
    clock.started = clock.suspended = 0
    for place in range(clock.sizes):
        row = int(w.numbers[place])
        for i in range(w.groups[row].sets):
            one = n.sets[n.lists[row, i]]
            waiting = waiting or one.count > one.capacity
            job, turns = one.head, one.capacity
            while job >= 0:
                if turns > 0 and not w.jobs[job].running:
                    w.slots[STARTED, clock.started] = job
                    clock.started += 1
                elif turns <= 0 and w.jobs[job].running:
                    w.slots[SUSPENDED, clock.suspended] = job
                    clock.suspended += 1
                turns -= 1
                job = w.jobs[job].after
    return waiting
