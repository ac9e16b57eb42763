"""The orders over arrays: when each policy's keys change, and when the policy wants to be woken.

Each function is the counterpart of the method that its docstring names, over ``arrays.World``.
"""

from __future__ import annotations

from math import floor, inf

from gpuslice.sched_core.policies.tiresias.mlfq import SOON_S

from .arrays import DUE, JOINING, ORDER, RISING, STARTED, SUSPENDED, World, compiled
from .heaps import pull, push, top
from .keys import NEXT_ROUND, attained_at, executed_at, set_key, up_to
from .ranking import crowded, order_anew, rank, refresh, rekey, sort, unrank
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
    TURNS,
)


@compiled
def expect(w: World, job: int, due: float) -> None:
    """Note when ``job`` will change its queue if nothing happens."""
    pull(w, DUE, job)
    pull(w, RISING, job)
    w.jobs[job].due = due
    if due < inf:
        push(w, DUE, job)
        if w.clock[0].kind >= PUBLISHED_QUEUES and not w.jobs[job].runs:
            push(w, RISING, job)


@compiled
def demotion(w: World, job: int, now: float) -> float:
    """Return when a running job reaches the end of its queue (``Mlfq._demotion_s``)."""
    j = w.jobs[job]
    if j.level == w.clock[0].queues:
        return inf
    since = j.since if j.running else now
    left = w.numbers[j.level] - attained_at(w, job, since)
    return float(since + (left / j.demand if w.clock[0].by_devices else left))


@compiled
def promotion(w: World, job: int, now: float) -> float:
    """Return when a job that waits from now on will have waited long enough (``_promotion_s``)."""
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
    """Note when ``job`` will have run as long as its queue has device-seconds (``PublishedDlas._watch``)."""
    j = w.jobs[job]
    last = j.level == w.clock[0].queues
    j.spent = inf if last else now + w.numbers[j.level] - (executed_at(w, job, now) - j.base_executed)


@compiled
def change_queues(w: World, now: float) -> None:
    """Demote and promote the jobs that are due (``Mlfq.update``)."""
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
    """Give the newest job the expectation of the last running one (``PublishedExpected.update``)."""
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
                w.jobs[job].key[0] += NEXT_ROUND
        order_anew(w)
    if now >= clock.alert:
        clock.alert = inf
    if kind in (PUBLISHED_GITTINS, PUBLISHED_SHORTEST):
        refresh(w)
    if kind == EXPECTED:
        expect_of_newest(w, now)
    if kind >= QUEUES:
        change_queues(w, now)
    contended = clock.was_crowded or clock.asked > clock.capacity
    clock.expired, clock.fresh = contended and kind in (REMAINING, ATTAINED, GITTINS), clock.count


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
        begin_slices(w)
    if kind >= PUBLISHED_QUEUES:
        running_first(w)


@compiled
def begin_slices(w: World) -> None:
    """Put the jobs that run into the present round (``RoundRobin.settled``): all, or those just started."""
    clock = w.clock[0]
    if clock.count and w.firsts[ORDER, 0] >= NEXT_ROUND:
        for i in range(clock.count):
            w.jobs[w.slots[ORDER, i]].key[0] -= NEXT_ROUND
        order_anew(w)
        return
    for i in range(clock.started):
        job = int(w.slots[STARTED, i])
        unrank(w, job)
        w.jobs[job].key[0] -= NEXT_ROUND
        rank(w, job)


@compiled
def settle_queues(w: World, now: float) -> None:
    """Update the counters of the queues (``Mlfq.settled``, ``PublishedDlas.settled``)."""
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
    """Put running jobs before waiting ones within each queue (``PublishedDlas.settled``)."""
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
    """Put ``job`` at the end of the running jobs of its queue, or at the head of the waiting ones."""
    w.clock[0].turn += 1
    unrank(w, job)
    j = w.jobs[job]
    j.sunk = False
    j.key[3], j.key[4] = waits, -w.clock[0].turn if waits else w.clock[0].turn
    rank(w, job)


@compiled
def wake_at(w: World, now: float) -> float:
    """Return when keys will change although nothing happens, or infinity (``RankedPolicy.wake_at``)."""
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
    """Return the published simulator's wake-up, with its mistakes (``PublishedDlas.wake_at``).

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
