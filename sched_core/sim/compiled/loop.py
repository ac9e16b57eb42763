"""The event loop of ``sim/engine.py`` over arrays, compiled."""

from __future__ import annotations

from math import inf, isnan

from .arrays import (
    DUE,
    ENDING,
    FLIPPED,
    ORDER,
    PENDING,
    RISING,
    STARTED,
    SUSPENDED,
    TIED,
    World,
    compiled,
)
from .heaps import pull, push, top
from .keys import set_key
from .orders import settle, update, wake_at
from .ranking import crowded, flip, place, rank, sort, spare, unrank, vacate
from .rules import NODE_SETS, PENDING_LONGEST

OVER, MORE, STUCK = range(3)


def advance(w: World, events: int) -> int:
    """Simulate at most ``events`` events.

    Return ``MORE`` if events are left, ``STUCK`` if the policy would be woken too early.

    At one instant completions come first, then arrivals, then the plan, which releases before it grants.
    """
    clock = w.clock[0]
    while clock.arrived < len(w.jobs) or clock.alive:
        if events == 0 or not has_room(w):
            return MORE
        events -= 1
        now = next_instant(w)
        process_arrivals_and_ends(w, now)
        take_order(w, now)
        carry_out(w, now)
        if clock.wake <= now:
            return STUCK
    return OVER


@compiled
def has_room(w: World) -> bool:
    """Return True if the log has room for the most that one event can add."""
    return bool(len(w.log) == 0 or w.clock[0].logged + 3 * w.clock[0].capacity <= len(w.log))


@compiled
def note(w: World, job: int, now: float, gives: bool) -> None:
    """Log that ``job`` gets its devices or gives them back."""
    if len(w.log):
        entry = w.log[w.clock[0].logged]
        entry.time_s, entry.job, entry.gives = now, job, gives
        w.clock[0].logged += 1


@compiled
def process_arrivals_and_ends(w: World, now: float) -> None:
    """Let time pass, end jobs and let others arrive."""
    clock = w.clock[0]
    pass_time(w, now)
    complete(w, now)
    while clock.arrived < len(w.jobs) and w.jobs[clock.arrived].submit <= now:
        arrive(w, now)


@compiled
def carry_out(w: World, now: float) -> None:
    """Release, then grant, as was decided (``Simulation._apply``)."""
    clock = w.clock[0]
    clock.was_crowded = clock.alive > clock.count
    for i in range(clock.suspended):
        release(w, int(w.slots[SUSPENDED, i]), now)
        w.jobs[w.slots[SUSPENDED, i]].preemptions += 1
    for i in range(clock.started):
        grant(w, int(w.slots[STARTED, i]), now)
    watch_room(w, now)
    clock.events += 1


@compiled
def watch_room(w: World, now: float) -> None:
    """Start and stop the clocks of jobs that wait although there is room (``Waits.update``)."""
    free = w.clock[0].free
    for row in range(w.clock[0].groups):
        group = w.groups[row]
        roomy = group.known and group.demand <= free
        if roomy and not group.roomy:
            group.since = now
        elif group.roomy and not roomy:
            group.room += now - group.since
        group.roomy = roomy


@compiled
def room_at(w: World, job: int, now: float) -> float:
    """Return the clock of jobs as large as ``job`` (``Clock.at``)."""
    group = w.groups[w.jobs[job].group]
    return float(group.room + (now - group.since) if group.roomy else group.room)


@compiled
def take_order(w: World, now: float) -> None:
    """List the jobs that are started and suspended under an order (``RankedPolicy.plan``)."""
    update(w, now)
    if w.clock[0].kind == PENDING_LONGEST:
        walk(w)
    else:
        spare(w, now)
    decide(w, now)
    settle(w, now)
    clock = w.clock[0]
    clock.wake = wake_at(w, now)
    if clock.spared_s < clock.wake and crowded(w):
        clock.wake = clock.spared_s


@compiled
def walk(w: World) -> None:
    """Start jobs in order, passing over the job after each started one (``PublishedLongestPending``)."""
    clock, pending, kept = w.clock[0], w.slots[PENDING], 0
    walking = True
    for place_in_line in range(clock.pending):
        job = int(pending[place_in_line])
        if walking and place_in_line % 2 == 0:
            walking = clock.free >= w.jobs[job].demand and place(w, job)
            if walking:
                flip(w, job)
                continue
        pending[kept] = job
        kept += 1
    clock.pending = kept


@compiled
def next_instant(w: World) -> float:
    """Return the earliest of the next arrival, completion and wake-up (``Simulation._next_instant``)."""
    clock, job = w.clock[0], top(w, ENDING)
    arrival = w.jobs[clock.arrived].submit if clock.arrived < len(w.jobs) else inf
    ending = w.jobs[job].end if job >= 0 else inf
    if clock.stale and job >= 0 and ending == arrival:
        clock.tied_s, clock.tied = arrival, 0
        for i in range(clock.count):
            if w.jobs[w.slots[ORDER, i]].end == arrival:
                w.slots[TIED, clock.tied] = w.slots[ORDER, i]
                clock.tied += 1
    return float(min(arrival, ending, clock.wake))


@compiled
def pass_time(w: World, now: float) -> None:
    """Advance the clock that jobs share (``Simulation._pass_time``)."""
    clock = w.clock[0]
    elapsed = now - clock.now
    if elapsed <= 0:
        return
    clock.now = now
    clock.job_s += elapsed * clock.alive


@compiled
def complete(w: World, now: float) -> None:
    """End the jobs whose work is done, and those that are tied to this arrival (``StaleCompletions``)."""
    clock = w.clock[0]
    if clock.tied_s == now:
        sort(w, TIED, clock.tied, False)
        for i in range(clock.tied):
            finish(w, int(w.slots[TIED, i]), now)
        clock.tied_s = -1.0
    job = top(w, ENDING)
    while job >= 0 and w.jobs[job].end <= now:
        finish(w, job, now)
        job = top(w, ENDING)


@compiled
def arrive(w: World, now: float) -> None:
    clock = w.clock[0]
    job = clock.arrived
    group = w.groups[w.jobs[job].group]
    group.known = True
    w.jobs[job].born, w.jobs[job].room = clock.job_s, room_at(w, job, now)
    clock.arrived += 1
    clock.alive += 1
    clock.asked += w.jobs[job].demand
    set_key(w, job, now)
    rank(w, job)
    if clock.kind == PENDING_LONGEST:
        w.slots[PENDING, clock.pending] = job
        clock.pending += 1


@compiled
def finish(w: World, job: int, now: float) -> None:
    """End ``job`` (``Simulation._finish``, ``RankedPolicy._forget``)."""
    j, clock = w.jobs[job], w.clock[0]
    unrank(w, job)
    pull(w, DUE, job)
    pull(w, RISING, job)
    vacate(w, job)
    if job == clock.newest:
        clock.newest = -1
    if j.running:
        note(w, job, now, True)
        release(w, job, now)
    j.finish = now
    life = now - j.submit
    j.contention = (clock.job_s - j.born) / life if life > 0 else clock.alive
    clock.alive -= 1
    clock.asked -= j.demand


@compiled
def decide(w: World, now: float) -> None:
    """List the jobs that are started and suspended for good, most urgent first."""
    clock = w.clock[0]
    clock.started = clock.suspended = 0
    for i in range(clock.flipped):
        job = w.slots[FLIPPED, i]
        j = w.jobs[job]
        j.touched = False
        if j.runs and not j.running:
            w.slots[STARTED, clock.started] = job
            clock.started += 1
        elif j.running and not j.runs:
            w.slots[SUSPENDED, clock.suspended] = job
            clock.suspended += 1
            note(w, job, now, True)
    for i in range(clock.started):
        note(w, int(w.slots[STARTED, i]), now, False)
    clock.flipped = 0
    sort(w, STARTED, clock.started, True)
    sort(w, SUSPENDED, clock.suspended, True)


@compiled
def grant(w: World, job: int, now: float) -> None:
    """Give ``job`` its devices (``Simulation._grant``)."""
    j = w.jobs[job]
    hold(w, j.demand)
    j.fragmented += room_at(w, job, now) - j.room
    j.since = now
    if isnan(j.first):
        j.first = now
    else:
        j.since = now + j.resume
        j.switching += j.resume
        j.lost += j.resume * j.demand
    j.running = True
    j.end = j.since + (j.duration - j.executed)
    push(w, ENDING, job)


@compiled
def release(w: World, job: int, now: float) -> None:
    """Take its devices from ``job`` (``Simulation._release``)."""
    j = w.jobs[job]
    hold(w, -j.demand)
    pull(w, ENDING, job)
    if now < j.since:
        j.switching -= j.since - now
        j.lost -= (j.since - now) * j.demand
    else:
        elapsed = now - j.since
        j.executed += elapsed
        j.service += elapsed * j.demand
    j.running = False
    j.since = now
    j.end = inf
    j.room = room_at(w, job, now)


@compiled
def hold(w: World, devices: int) -> None:
    """Count devices that are taken or, below 0, given back, under policies without a ranking."""
    clock = w.clock[0]
    if clock.kind == NODE_SETS:
        clock.free -= devices
        clock.count += 1 if devices > 0 else -1
