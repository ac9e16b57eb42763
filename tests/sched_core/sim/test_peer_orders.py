"""The published simulator's orders against the same rules spelled out with plain lists."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import pytest

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.policies.tiresias.gittins import yarn_services
from gpuslice.sched_core.sim.peer import parse_peer
from gpuslice.sched_core.traces.trace import Trace

SERVICES = sorted(yarn_services())


@dataclass(eq=False)
class NaiveJob:
    submit: int
    devices: int
    duration: int
    running: bool = False
    executed: int = 0
    expected: float = 0.0
    start: int = -1
    end: int = -1


def expected(executed: int) -> float:
    last, first = len(SERVICES) - 1, bisect_right(SERVICES, executed)
    return round(sum(SERVICES[first:last]) / (last - first), 2)


def preemptive(todo: list[NaiveJob], capacity: int, key: Callable[[NaiveJob], float]) -> None:
    """One list, sorted in place at every event; whoever fits runs."""
    times = sorted({job.submit for job in todo})
    alive: list[NaiveJob] = []
    now, newest = 0, todo[0]
    while times or alive:
        ends = [now + job.duration - job.executed for job in alive if job.running]
        then = min([*ends, *times[:1]], default=inf)
        passed, now = int(then) - now, int(then)
        for job in alive:
            job.executed += passed * job.running
        for job in [job for job in alive if job.running and job.executed == job.duration]:
            job.end = now
            alive.remove(job)
        if times and now == times[0]:
            times.pop(0)
            for job in todo:
                if job.submit == now:
                    alive.append(job)
                    job.expected, newest = expected(0), job
        for job in alive:
            if job.running:
                newest.expected = expected(job.executed)
        alive.sort(key=key)
        free = capacity
        for job in alive:
            job.running = job.devices <= free
            free -= job.devices * job.running
            if job.running and job.start < 0:
                job.start = now


def queued(todo: list[NaiveJob], nodes: int, size: int, *, rule: str, yarn: bool) -> None:
    """No preemption; ``rule`` says what happens to the list after a job was tried."""
    free = [size] * nodes
    held: list[tuple[int, dict[int, int]]] = []
    pending: list[NaiveJob] = []
    times = sorted({job.submit for job in todo})
    while times or held:
        now = min([end for end, _ in held] + times[:1])
        for end, parts in [item for item in held if item[0] == now]:
            held.remove((end, parts))
            for node, count in parts.items():
                free[node] += count
        if times and times[0] == now:
            times.pop(0)
            pending += [job for job in todo if job.submit == now]
        position = 0
        while position < len(pending):
            job = pending[position]
            parts = place(job.devices, free, size, yarn=yarn)
            if parts is None:
                if rule != "fjf":
                    break
                position += 1
                continue
            for node, count in parts.items():
                free[node] -= count
            job.start, job.end = now, now + job.duration
            held.append((job.end, parts))
            del pending[position]
            position += rule == "lpjf"


def place(devices: int, free: list[int], size: int, *, yarn: bool) -> dict[int, int] | None:
    if not yarn:
        if sum(free) < devices:
            return None
        parts: dict[int, int] = {}
        for node, count in enumerate(free):
            parts[node] = min(count, devices - sum(parts.values()))
        return parts
    whole, rest = divmod(devices, size)
    if devices <= size:
        whole, rest = 0, devices
    parts = dict.fromkeys([n for n, count in enumerate(free) if count == size][:whole], size)
    if len(parts) < whole:
        return None
    if rest:
        node = next((n for n, count in enumerate(free) if count >= rest and n not in parts), None)
        if node is None:
            return None
        parts[node] = rest
    return parts


PREEMPTIVE: dict[str, Callable[[NaiveJob], float]] = {
    "sjf": lambda job: job.devices,
    "shortest": lambda job: job.duration - job.executed,
    "shortest-gpu": lambda job: (job.duration - job.executed) * job.devices,
    "shortest-expected": lambda job: job.expected,
}


def jobs_of(seed: int, *, largest: int) -> list[NaiveJob]:
    draw = random.Random(seed)
    grid = draw.choice([1, 7, 60])
    sizes = [1, 1, 2, 3, 4, 6, 8, 12][: 8 if largest > 8 else 7]
    jobs = [
        NaiveJob(
            draw.randrange(0, 1200, grid),
            draw.choice(sizes),
            0 if draw.random() < 0.1 else draw.randrange(grid, 600, grid),
        )
        for _ in range(40)
    ]
    return sorted(jobs, key=lambda job: job.submit)


def compare(jobs: list[NaiveJob], cluster: str, peer: str) -> None:
    trace = Trace(
        [str(i) for i in range(len(jobs))],
        [job.submit for job in jobs],
        [job.devices for job in jobs],
        [job.duration for job in jobs],
    )
    outcome = parse_peer(peer).prepare(trace, Cluster.parse(cluster)).run()
    assert outcome.first_start_s.tolist() == [job.start for job in jobs]
    assert outcome.finish_s.tolist() == [job.end for job in jobs]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("schedule", PREEMPTIVE)
def test_preemptive_orders(schedule: str, seed: int) -> None:
    jobs = jobs_of(seed, largest=8)
    preemptive(jobs, 8, PREEMPTIVE[schedule])
    compare(jobs, "2x4", f"tiresias:{schedule}/count")


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "peer", ["fifo/count", "fifo/yarn", "fjf/count", "fjf/yarn", "lpjf/count", "lpjf/yarn"]
)
def test_queued_orders(peer: str, seed: int) -> None:
    rule, scheme = peer.split("/")
    jobs = jobs_of(seed, largest=12)
    queued(jobs, 4, 4, rule=rule, yarn=scheme == "yarn")
    compare(jobs, "4x4", f"tiresias:{rule}/{scheme}")
