"""The orders over arrays: what each policy's key is, when it changes, and when the policy wants to be woken.

Each function is the counterpart of the method that its docstring names, over ``arrays.World``.
"""

from __future__ import annotations

from math import floor, inf
from typing import Any

from gpuslice.sched_core.policies.tiresias.mlfq import SOON_S

from .arrays import (
    DUE,
    JOINING,
    ORDER,
    RISING,
    STARTED,
    SUSPENDED,
    World,
    compiled,
    crowded,
    pull,
    push,
    rank,
    sort,
    top,
    unrank,
)
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


@compiled
def executed_at(w: World, job: int, now: float) -> float:
    j = w.jobs[job]
    return float(j.executed + (now - j.since) if j.running and now > j.since else j.executed)


@compiled
def attained_at(w: World, job: int, now: float) -> float:
    """What counts in queues and for ``las``: service, or time, since the first queue was entered."""
    j = w.jobs[job]
    if not w.clock[0].by_devices:
        return float(executed_at(w, job, now) - j.base_executed)
    service = j.service + (now - j.since) * j.demand if j.running and now > j.since else j.service
    return float(service - j.base_service)


@compiled
def up_to(samples: Any, value: float) -> int:
    """How many of the ascending ``samples`` are at most ``value``."""
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
    """``PublishedIndex.at``, or ``GittinsIndex.within`` up to the end of the queue."""
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
    """``waiting_key`` of each order, and what else running jobs are given."""
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
        key[0], key[1] = 1, clock.turn
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


@compiled
def rekey(w: World, job: int, now: float) -> None:
    unrank(w, job)
    set_key(w, job, now)
    rank(w, job)


@compiled
def rekey_running(w: World, now: float) -> None:
    """Give running jobs the keys of ``now``, in orders that shift as jobs run."""
    clock = w.clock[0]
    kind = clock.kind
    for place in range(clock.count):
        job = w.slots[ORDER, place]
        key, old = w.jobs[job].key, w.jobs[job].key[0]
        if kind == PUBLISHED_GITTINS:
            key[1], key[3], key[4] = -index_at(w, job, now), 0, place
        elif kind == PUBLISHED_SHORTEST:
            remaining = w.jobs[job].duration - executed_at(w, job, now)
            key[0] = remaining * (w.jobs[job].demand if clock.by_devices else 1)
            if key[0] != old:
                key[1], key[2], key[3] = clock.events + 1, 1, place
        elif kind != GITTINS or w.jobs[job].level < clock.queues:
            set_key(w, job, now)
    sort(w, ORDER, clock.count, True)


@compiled
def expect(w: World, job: int, due: float) -> None:
    """Note when ``job`` will change its queue, if it goes on as it does."""
    pull(w, DUE, job)
    pull(w, RISING, job)
    w.jobs[job].due = due
    if due < inf:
        push(w, DUE, job)
        if w.clock[0].kind >= PUBLISHED_QUEUES and not w.jobs[job].runs:
            push(w, RISING, job)


@compiled
def demotion(w: World, job: int, now: float) -> float:
    """When a job that runs reaches the end of its queue (``Mlfq._demotion_s``)."""
    j = w.jobs[job]
    if j.level == w.clock[0].queues:
        return inf
    since = j.since if j.running else now
    left = w.numbers[j.level] - attained_at(w, job, since)
    return float(since + (left / j.demand if w.clock[0].by_devices else left))


@compiled
def promotion(w: World, job: int, now: float) -> float:
    """When a job that waits from now on will have waited for long enough (``_promotion_s``)."""
    j, clock = w.jobs[job], w.clock[0]
    executed = executed_at(w, job, now) - j.base_executed
    if j.level == 0 or clock.promote == inf or executed <= 0:
        return inf
    if clock.kind >= PUBLISHED_QUEUES:
        return float(now + floor(executed * clock.promote) - j.waited)
    due = float(now + clock.promote * executed)
    return float(due - j.waited) if clock.sums_waits else due


@compiled
def watch(w: World, job: int, now: float) -> None:
    """When ``job`` will have run for as long as its queue has device-seconds (``PublishedDlas._watch``)."""
    j = w.jobs[job]
    last = j.level == w.clock[0].queues
    j.spent = inf if last else now + w.numbers[j.level] - (executed_at(w, job, now) - j.base_executed)


@compiled
def change_queues(w: World, now: float) -> None:
    """Demote and promote what is due (``Mlfq.update``)."""
    published = w.clock[0].kind >= PUBLISHED_QUEUES
    count, job = 0, top(w, DUE)
    while job >= 0 and w.jobs[job].due <= now:
        expect(w, job, inf)
        w.slots[JOINING, count] = job
        count, job = count + 1, top(w, DUE)
    sort(w, JOINING, count, False)
    for i in range(count):
        job = int(w.slots[JOINING, i])
        j = w.jobs[job]
        if j.runs and published:
            j.level += 1
            j.sunk = True
            expect(w, job, demotion(w, job, now))
            watch(w, job, now)
        elif j.runs:
            while demotion(w, job, now) <= now:
                j.level += 1
            expect(w, job, demotion(w, job, now))
        else:
            j.promotions += 1
            j.level, j.entered, j.started, j.waited = 0, now, inf, 0.0
            j.base_service, j.base_executed = j.service, j.executed
        rekey(w, job, now)


@compiled
def expect_of_newest(w: World, now: float) -> None:
    """Expect of whoever came last what the last of those that run promises (``PublishedExpected.update``)."""
    clock = w.clock[0]
    if clock.newest < 0 or clock.count == 0:
        return
    last = int(w.slots[ORDER, clock.count - 1])
    samples = w.numbers[: clock.samples]
    value = w.numbers[clock.samples + up_to(samples, executed_at(w, last, now))]
    key = w.jobs[clock.newest].key
    if value != key[0]:
        clock.turn += 1
        unrank(w, clock.newest)
        key[1] = clock.turn if value < key[0] or clock.newest_s == now else -clock.turn
        key[0] = value
        rank(w, clock.newest)


@compiled
def update(w: World, now: float) -> None:
    """Change keys because time passed (``RankedPolicy.update``)."""
    clock = w.clock[0]
    kind = clock.kind
    if kind == TURNS and now >= clock.alert:
        for place in range(clock.count):  # One by one those that trained go to the end of the line.
            job = int(w.slots[ORDER, place])
            if w.jobs[job].since < now:
                set_key(w, job, now)
            else:
                w.jobs[job].key[0] = 1
        sort(w, ORDER, clock.count, True)
    if now >= clock.alert:
        clock.alert = inf
    if kind in (PUBLISHED_GITTINS, PUBLISHED_SHORTEST):
        rekey_running(w, now)
    if kind == EXPECTED:
        expect_of_newest(w, now)
    if kind >= QUEUES:
        change_queues(w, now)
    contended = clock.was_crowded or clock.asked > clock.capacity
    if contended and kind in (REMAINING, ATTAINED, GITTINS):
        rekey_running(w, now)


@compiled
def settle(w: World, now: float) -> None:
    """Change keys after the decision (``RankedPolicy.settled``)."""
    clock = w.clock[0]
    kind = clock.kind
    if kind >= QUEUES:
        settle_queues(w, now)
    if kind in (FIRST, SHORTEST, QUEUES, GITTINS):
        for i in range(clock.started):
            rekey(w, int(w.slots[STARTED, i]), now)
    if kind in (REMAINING, ATTAINED, GITTINS):
        for i in range(clock.suspended):
            rekey(w, int(w.slots[SUSPENDED, i]), now)
    if kind == TURNS:
        for i in range(clock.count):
            w.jobs[w.slots[ORDER, i]].key[0] = 0
        sort(w, ORDER, clock.count, True)
    if kind >= PUBLISHED_QUEUES:
        running_first(w)


@compiled
def settle_queues(w: World, now: float) -> None:
    """Counters of the queues (``Mlfq.settled``, ``PublishedDlas.settled``)."""
    for i in range(w.clock[0].started):
        job = int(w.slots[STARTED, i])
        j = w.jobs[job]
        if j.executed > j.base_executed:
            j.waited += now - j.since
        if j.started == inf:
            j.started = now
        j.sunk = True
        expect(w, job, demotion(w, job, now))
        watch(w, job, now)
    for i in range(w.clock[0].suspended):
        job = int(w.slots[SUSPENDED, i])
        expect(w, job, promotion(w, job, now))


@compiled
def running_first(w: World) -> None:
    """Within a queue, running jobs come before waiting ones (``PublishedDlas.settled``)."""
    clock, count = w.clock[0], 0
    for i in range(clock.count):
        if w.jobs[w.slots[ORDER, i]].sunk:
            w.slots[JOINING, count] = w.slots[ORDER, i]
            count += 1
    for i in range(count):
        move(w, int(w.slots[JOINING, i]), 0)
    for i in range(clock.suspended - 1, -1, -1):
        job = int(w.slots[SUSPENDED, i])
        w.jobs[job].sunk = False
        if w.jobs[job].key[3] == 0:
            move(w, job, 1)


@compiled
def move(w: World, job: int, waits: int) -> None:
    """Put ``job`` at the end of those that run in its queue, or at the head of those that wait."""
    w.clock[0].turn += 1
    unrank(w, job)
    j = w.jobs[job]
    j.sunk = False
    j.key[3], j.key[4] = waits, -w.clock[0].turn if waits else w.clock[0].turn
    rank(w, job)


@compiled
def wake_at(w: World, now: float) -> float:
    """When keys will change although nothing happens, or infinity (``RankedPolicy.wake_at``)."""
    clock = w.clock[0]
    kind = clock.kind
    waits = crowded(w)
    if kind >= PUBLISHED_QUEUES:
        return published_wake(w, now)
    if kind >= QUEUES:
        job = top(w, DUE) if waits else -1
        if job >= 0 and w.jobs[job].due <= now:
            return now + SOON_S
        return float(w.jobs[job].due) if job >= 0 else inf
    if kind == ATTAINED and not waits:
        clock.alert = inf
    elif kind == ATTAINED and clock.alert == inf:
        clock.alert = now + clock.slice_s
    elif kind == TURNS and waits and clock.alert == inf:
        slices = floor(now / clock.slice_s) + 1
        while slices * clock.slice_s <= now:
            slices += 1
        clock.alert = slices * clock.slice_s
    return float(clock.alert)


@compiled
def published_wake(w: World, now: float) -> float:
    """The published simulator's wake-ups, its mistakes included (``PublishedDlas.wake_at``).

    Of whole seconds, as the peer has, the floor of a quotient is what ``//`` gives, twenty times as fast.
    """
    clock, wake = w.clock[0], inf
    for i in range(clock.count):
        j = w.jobs[w.slots[ORDER, i]]
        if j.spent < inf:
            wake = min(wake, now + floor((j.spent - now) / (j.demand if clock.by_devices else 1)))
    job = top(w, RISING)
    while job >= 0 and w.jobs[job].due <= now:
        pull(w, RISING, job)
        job = top(w, RISING)
    return min(wake, float(w.jobs[job].due)) if job >= 0 else wake
