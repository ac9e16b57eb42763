"""Jobs as records, heaps of their numbers, and the ranking over them (``policies/ranking.py``), compiled.

Few arrays hold everything: numba takes longer to compile the more of them every call passes on.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np

from .rules import ANYWHERE, FULLEST

F = TypeVar("F", bound=Callable[..., Any])

#: Heaps: who waits, by key; what runs, by its end; who changes queue next; whose promotion wakes (published).
WAITING, ENDING, DUE, RISING = range(4)
#: Rows of ``World.slots``: the heaps; the running jobs, most urgent first; lists that last for one event, but
#: for ``TIED``, the jobs that end with the next arrival whatever happens before, and ``PENDING``, those that
#: wait in order of arrival (``lpjf``).
ORDER, FLIPPED, STARTED, SUSPENDED, JOINING, TIED, PENDING = range(4, 11)
#: Rows of ``World.nodes``: how many devices are free; the next node that is wholly its holder's, or -1.
FREE, NEXT = range(2)

#: A job: of ``SimJob`` and of its entry in the ranking. ``runs`` is the plan, ``running`` the engine's fact;
#: ``group`` is its row in ``World.groups``, ``at`` where it is in each heap, or -1; ``whole`` is the first of
#: the nodes that it has for itself, ``rest`` the one that it shares, or -1; ``after`` is the next job of
#: its node set (``node_sets.py``), which it joined when it ``started``.
#: ``own`` is its key while it is spared.
JOB = np.dtype(
    [(name, np.float64) for name in ("submit", "duration", "resume", "executed", "service", "since", "end")]
    + [(name, np.float64) for name in ("born", "room", "fragmented", "lost", "first", "finish", "contention")]
    + [("switching", np.float64)]
    + [(name, np.float64) for name in ("entered", "started", "base_service", "base_executed", "waited")]
    + [(name, np.float64) for name in ("due", "spent")]
    + [("key", np.float64, (5,)), ("own", np.float64, (5,)), ("at", np.int32, (4,))]
    + [(name, np.int32) for name in ("demand", "group", "level", "preemptions", "promotions")]
    + [(name, np.int32) for name in ("whole", "rest", "after")]
    + [(name, np.bool_) for name in ("running", "runs", "touched", "sunk")],
    align=True,
)
#: All jobs of one demand. ``room`` is the clock of ``waiting.Waits`` that runs while that many devices are
#: free, since ``since`` if it runs now (``roomy``); ``start`` and ``filled`` say where in ``slots`` a heap
#: is; ``blocked``: none can be placed now. Three more records for the other heaps.
GROUP = np.dtype(
    [
        ("room", np.float64),
        ("since", np.float64),
        *((name, np.int64) for name in ("demand", "start", "filled", "sets", "wanted")),
        ("known", np.bool_),
        ("roomy", np.bool_),
        ("blocked", np.bool_),
    ],
    align=True,
)
#: Everything else: the policy in numbers (``rules.Rule``), and what changes as time passes. ``alert`` is when
#: the policy looks at the order again (las, rr), ``newest`` who came last, at ``newest_s`` (``EXPECTED``).
#: A slice lasts ``slice_s``; nobody who began less than ``least_s`` ago is suspended, before ``spared_s``.
CLOCK = np.dtype(
    [
        (name, np.float64)
        for name in (
            *("promote", "quantum_s", "now", "wake", "job_s", "alert", "tied_s", "newest_s"),
            *("slice_s", "least_s", "spared_s"),
        )
    ]
    + [(name, np.int64) for name in ("kind", "placing", "queues", "samples", "groups", "capacity", "newest")]
    + [(name, np.int64) for name in ("arrived", "alive", "count", "free", "asked", "events", "turn")]
    + [(name, np.int64) for name in ("flipped", "started", "suspended", "tied", "pending", "node_size")]
    + [(name, np.int64) for name in ("sizes", "idle_nodes", "logged")]
    + [
        (name, np.bool_) for name in ("strict", "by_devices", "stale", "was_crowded", "sparing", "sums_waits")
    ],
    align=True,
)


class World(NamedTuple):
    """The arrays of one run.

    Attributes
    ----------
    jobs, groups, clock
        Records; ``clock`` is a single one.
    slots
        Lists of jobs, shape ``(11, jobs)``.
    nodes
        What each node has, shape ``(2, nodes)``; looked at where nodes matter only.
    numbers
        Thresholds of the queues; sampled services, ascending; what an index looks up at them. Or the sizes of
        jobs that have node sets, as rows of ``groups``, in the order in which they are walked.
    log
        ``clock.logged`` entries of who was started and released (``devices.LOG``); empty if nobody asks.
    """

    jobs: Any
    groups: Any
    clock: Any
    slots: Any
    nodes: Any
    numbers: Any
    log: Any


#: Nothing here allocates; counting references to the arrays would take a third of the time.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}


def compiled(function: F) -> F:
    """Compile ``function`` when it is first called by compiled code."""
    jit: Any = numba.njit  # Its annotations lack these options.
    jitted: F = jit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)
    return jitted


@compiled
def urgent(w: World, one: int, other: int) -> bool:
    """Whether job ``one`` goes before ``other``: by key, column by column, then by number."""
    for column in range(5):
        if w.jobs[one].key[column] != w.jobs[other].key[column]:
            return bool(w.jobs[one].key[column] < w.jobs[other].key[column])
    return one < other


@compiled
def before(w: World, kind: int, one: int, other: int) -> bool:
    """Whether job ``one`` comes before ``other`` in heaps of ``kind``."""
    if kind == WAITING:
        return urgent(w, one, other)
    a = w.jobs[one].end if kind == ENDING else w.jobs[one].due
    b = w.jobs[other].end if kind == ENDING else w.jobs[other].due
    return bool(a < b or (a == b and one < other))


@compiled
def sift(w: World, kind: int, row: int, at: int) -> None:
    """Put the job at position ``at`` of the heap of ``w.groups[row]`` where it belongs."""
    start, filled = w.groups[row].start, w.groups[row].filled
    heap = w.slots[kind]
    job = heap[start + at]
    while at > 0 and before(w, kind, job, heap[start + (at - 1) // 2]):
        heap[start + at] = heap[start + (at - 1) // 2]
        w.jobs[heap[start + at]].at[kind] = at
        at = (at - 1) // 2
    below = 2 * at + 1
    while below < filled:
        if below + 1 < filled and before(w, kind, heap[start + below + 1], heap[start + below]):
            below += 1
        if not before(w, kind, heap[start + below], job):
            break
        heap[start + at] = heap[start + below]
        w.jobs[heap[start + at]].at[kind] = at
        at, below = below, 2 * below + 1
    heap[start + at] = job
    w.jobs[job].at[kind] = at


@compiled
def push(w: World, kind: int, job: int) -> None:
    """Add ``job``, which is not in it, to its heap of ``kind``."""
    row = w.jobs[job].group if kind == WAITING else w.clock[0].groups + kind - 1
    group = w.groups[row]
    w.slots[kind, group.start + group.filled] = job
    group.filled += 1
    sift(w, kind, row, group.filled - 1)


@compiled
def pull(w: World, kind: int, job: int) -> None:
    """Take ``job`` from its heap of ``kind``, if it is in it; what it is ordered by has not changed."""
    at = w.jobs[job].at[kind]
    if at < 0:
        return
    row = w.jobs[job].group if kind == WAITING else w.clock[0].groups + kind - 1
    group = w.groups[row]
    w.jobs[job].at[kind] = -1
    group.filled -= 1
    if at < group.filled:
        w.slots[kind, group.start + at] = w.slots[kind, group.start + group.filled]
        sift(w, kind, row, at)


@compiled
def top(w: World, kind: int) -> int:
    """The first job of the heap of ``kind``, or -1."""
    group = w.groups[w.clock[0].groups + kind - 1]
    return int(w.slots[kind, group.start]) if group.filled else -1


@compiled
def position(w: World, job: int) -> int:
    """How many running jobs come before ``job``."""
    low, high = 0, w.clock[0].count
    while low < high:
        middle = (low + high) // 2
        if urgent(w, w.slots[ORDER, middle], job):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def rank(w: World, job: int) -> None:
    """Put ``job`` where its key says (``Ranking.add``)."""
    clock, order = w.clock[0], w.slots[ORDER]
    if not w.jobs[job].runs:
        push(w, WAITING, job)
        return
    at = position(w, job)
    for i in range(clock.count, at, -1):
        order[i] = order[i - 1]
    order[at] = job
    clock.count += 1
    clock.free -= w.jobs[job].demand


@compiled
def unrank(w: World, job: int) -> None:
    """Take ``job`` out, before its key changes (``Ranking.remove``)."""
    clock, order = w.clock[0], w.slots[ORDER]
    if not w.jobs[job].runs:
        pull(w, WAITING, job)
        return
    at = position(w, job)
    clock.count -= 1
    for i in range(at, clock.count):
        order[i] = order[i + 1]
    clock.free += w.jobs[job].demand


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
    """Whether enough is left for ``job`` once everything behind it gives way (``Ranking._fits``)."""
    left, i = w.clock[0].free, w.clock[0].count
    while left < w.jobs[job].demand:
        i -= 1
        if i < 0 or urgent(w, w.slots[ORDER, i], job):
            return False
        left += w.jobs[w.slots[ORDER, i]].demand
    return True


@compiled
def next_start(w: World) -> int:
    """The most urgent waiting job that fits behind everything more urgent, or -1 (``_next_start``)."""
    best, clock = -1, w.clock[0]
    for row in range(clock.groups):
        if w.groups[row].filled and not w.groups[row].blocked:
            head = int(w.slots[WAITING, w.groups[row].start])
            if (best < 0 or urgent(w, head, best)) and (clock.strict or fits(w, head)):
                best = head
    return -1 if best >= 0 and clock.strict and not fits(w, best) else best


@compiled
def place(w: World, job: int) -> bool:
    """Whether there are nodes for ``job``; it gets them (``Consolidated.choose``, ``PublishedYarn``)."""
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
    """Let ``job`` run if it waits, and wait if it runs."""
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
    """Let run exactly those that the greedy walk lets run (``Ranking.repair``), where they can be placed.

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
                left += w.jobs[w.slots[ORDER, i]].demand
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
    """``repair``, but suspend nobody whose slice was not worth the switch yet (``RankedPolicy._spare``)."""
    clock, order, young, count = w.clock[0], w.slots[ORDER], w.slots[JOINING], 0
    clock.spared_s = inf
    if clock.sparing and clock.least_s > 0 and crowded(w):
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
        sort(w, ORDER, clock.count, True)
    repair(w)
    for i in range(count):
        j = w.jobs[young[i]]
        for column in range(5):
            j.key[column] = j.own[column]
    if count:
        sort(w, ORDER, clock.count, True)


@compiled
def crowded(w: World) -> bool:
    """Whether anybody waits."""
    return bool(w.clock[0].alive > w.clock[0].count)
