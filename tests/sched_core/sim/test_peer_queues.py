"""The published simulator's queues against the same rules spelled out with plain lists.

The naive version walks everything at every event, as the peer does: completions, arrivals, books, one pass of
scheduling over an empty cluster. It equals the recorded results too; here it judges traces made up at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import pytest

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.policies.tiresias.gittins import PublishedIndex, yarn_services
from gpuslice.sched_core.sim.peer import parse_peer
from gpuslice.sched_core.traces.trace import Trace

from .peer_results import results

LIMITS = (3250, 7200)


@dataclass(eq=False)
class NaiveJob:
    number: int
    submit: int
    devices: int
    duration: int
    level: int = 0
    running: bool = False
    checked: int = 0
    executed: int = 0
    executed_total: int = 0
    pending: int = 0
    start: int = -1
    end: int = -1
    preempt: int = 0
    promote: int = 0
    rank: float = 0.0


def simulate_naively(
    jobs: list[tuple[int, int, int]],
    capacity: int,
    *,
    gpu_time: bool = True,
    factor: float = 0,
    index: Callable[[int], float] | None = None,
) -> list[tuple[int, int, int, int]]:
    """(start, end, preempt, promote) of each of ``jobs`` = (submit, devices, duration), sorted by submit."""
    todo = [NaiveJob(i, s, d, r, checked=s) for i, (s, d, r) in enumerate(jobs)]
    arrivals: dict[int, dict[str, list[NaiveJob]]] = {}
    for job in todo:
        arrivals.setdefault(job.submit, {"start": [], "end": []})["start"].append(job)
    times = sorted(arrivals)
    queues: list[list[NaiveJob]] = [[], [], []]
    alive: list[NaiveJob] = []
    end_time, ending, jump = inf, [], inf
    while times or alive:
        start_time = times[0] if times else inf
        now, event = min(start_time, end_time), {"start": [], "end": ending}
        if start_time <= end_time:
            event = arrivals[int(start_time)]
            if start_time == end_time:
                event["end"] = ending
        if now > jump:
            now, event = jump, {"start": [], "end": []}
        for job in event["end"]:
            job.end = int(now)
            alive.remove(job)
            queues[job.level].remove(job)
        for job in event["start"]:
            alive.append(job)
            queues[0].append(job)
        if event["start"]:
            times.pop(0)
        for job in alive:
            _book(job, int(now), queues, gpu_time, factor)
            if index is not None:
                job.rank = index(job.executed * (job.devices if gpu_time else 1))
        _schedule(queues, capacity, int(now), ranked=index is not None)
        end_time = min((now + j.duration - j.executed_total for j in alive if j.running), default=inf)
        ending = [j for j in alive if j.running and now + j.duration - j.executed_total == end_time]
        jump = _next_jump(alive, int(now), gpu_time, factor)
    return [(job.start, job.end, job.preempt, job.promote) for job in todo]


def _book(job: NaiveJob, now: int, queues: list[list[NaiveJob]], gpu_time: bool, factor: float) -> None:
    passed, job.checked = now - job.checked, now
    if job.running:
        job.executed += passed
        job.executed_total += passed
        service = job.executed * (job.devices if gpu_time else 1)
        if job.level < 2 and service >= LIMITS[job.level]:
            queues[job.level].remove(job)
            job.level += 1
            queues[job.level].append(job)
        return
    if job.executed > 0:
        job.pending += passed
        if factor > 0 and job.level > 0 and job.pending >= int(job.executed * factor):
            job.executed = job.pending = 0
            queues[job.level].remove(job)
            job.level = 0
            queues[0].append(job)
            job.promote += 1


def _schedule(queues: list[list[NaiveJob]], capacity: int, now: int, *, ranked: bool) -> None:
    free = capacity
    for queue in queues:
        if ranked:
            queue.sort(key=lambda job: (job.rank, -job.submit), reverse=True)
        for job in queue:
            fits = job.devices <= free
            if fits:
                free -= job.devices
                if job.start < 0:
                    job.start = now
            elif job.running:
                job.preempt += 1
            job.running = fits
        queue.sort(key=lambda job: not job.running)


def _next_jump(alive: list[NaiveJob], now: int, gpu_time: bool, factor: float) -> float:
    jump = inf
    for job in alive:
        if job.running and job.level < 2:
            left = LIMITS[job.level] - job.executed
            jump = min(jump, now + (left // job.devices if gpu_time else left))
        elif not job.running and factor > 0 and job.level > 0 and job.executed > 0:
            wait = int(job.executed * factor - job.pending)
            if wait > 0:
                jump = min(jump, now + wait)
    return jump


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("dlas", {"gpu_time": False}),
        ("dlas-gpu", {}),
        ("dlas-gpu-05", {"factor": 0.5}),
        ("dlas-gpu-1", {"factor": 1}),
        ("dlas-gpu-8", {"factor": 8}),
        ("dlas-gpu-gittins", {"index": PublishedIndex(yarn_services()).at}),
    ],
)
def test_queues_on_random_traces(schedule: str, options: dict[str, object], seed: int) -> None:
    """Coarse times on purpose: many things fall on one second."""
    draw = random.Random(seed)
    grid = draw.choice([1, 50, 325])
    jobs = sorted(
        (
            draw.randrange(0, 20_000, grid),
            draw.choice([1, 1, 2, 3, 4, 8]),
            draw.randrange(grid, 9_000, grid),
        )
        for _ in range(40)
    )
    submit, devices, durations = zip(*jobs, strict=True)
    trace = Trace([str(i) for i in range(len(jobs))], submit, devices, durations)
    assert results(trace, "2x4", f"tiresias:{schedule}/count") == simulate_naively(jobs, 8, **options)


def test_a_job_that_stops_for_an_instant_is_completed_once() -> None:
    """At 6,500 job 0 makes way for job 1, which takes no time, and goes on; it ends as job 2 arrives."""
    rows = [(3250, 1, 9750), (3250, 8, 0), (13000, 1, 0)]
    submit, devices, durations = zip(*rows, strict=True)
    trace = Trace(["0", "1", "2"], submit, devices, durations)
    expected = simulate_naively(rows, 8, factor=0.5)
    assert results(trace, "1x8", "tiresias:dlas-gpu-05/count") == expected
    assert [end for _, end, _, _ in expected] == [13000, 6500, 13000]


def test_a_stale_completion_is_reproduced() -> None:
    """Smallest case found: job 0 would end with the arrival of job 2 and is demoted, suspended before."""
    jobs = [(0, 1, 3300), (3200, 1, 500), (3300, 1, 10)]
    expected = simulate_naively(jobs, 1)
    submit, devices, durations = zip(*jobs, strict=True)
    trace = Trace(["0", "1", "2"], submit, devices, durations)
    outcome = parse_peer("tiresias:dlas-gpu/count").prepare(trace, Cluster([1])).run()
    assert outcome.finish_s.tolist() == [end for _, end, _, _ in expected]
    assert outcome.finish_s[0] == 3300
    assert outcome.executed_s[0] == 3250
