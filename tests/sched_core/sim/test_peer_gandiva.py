"""The published simulator's ``gandiva`` against the same rules spelled out tick by tick.

The naive version equals the recorded results too; here it judges traces made up at random.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import ceil, floor

import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.sim.peer import parse_peer
from gpuslice.sched_core.traces.trace import Trace

SIZES = (16, 1, 2, 4, 24, 32, 8, 64, 12)


@dataclass(eq=False)
class NaiveJob:
    submit: int
    devices: int
    duration: int
    executed: int = 0
    start: int = -1
    end: int = -1


@dataclass(eq=False)
class NaiveSet:
    nodes: int
    capacity: int
    load: int = 0
    jobs: list[NaiveJob] = field(default_factory=list)


class Naive:
    def __init__(self, nodes: int, node_size: int) -> None:
        self.free, self.nodes, self.size = nodes, nodes, node_size
        self.sets: dict[int, list[NaiveSet]] = {size: [] for size in SIZES}

    def run(self, todo: list[NaiveJob]) -> None:
        """Fill in start and end of ``todo``, sorted by submission."""
        times = sorted({job.submit for job in todo})
        pending: list[NaiveJob] = []
        living, now, passed = len(todo), times[0], 0
        while living:
            self.adjust()
            ended, released = self.execute(now, passed)
            living -= ended
            if times and times[0] == now:
                times.pop(0)
                for job in todo:
                    if job.submit == now:
                        if self.join(job):
                            job.start = now
                        else:
                            pending.append(job)
            if released:
                # Walked while it shrinks, as the peer does.
                for job in pending:
                    if self.join(job):
                        pending.remove(job)
                        job.start = now
            then = times[0] if times and now + 10 > times[0] else now + 10
            passed, now = then - now, then

    def execute(self, now: int, passed: int) -> tuple[int, bool]:
        count, released = 0, False
        for group in self.sets.values():
            for one in list(group):
                running = one.jobs[: one.capacity]
                for job in running:
                    job.executed += passed
                ended = [job for job in running if job.executed >= job.duration]
                if now % 60 == 0 and len(one.jobs) > len(running):
                    one.jobs = one.jobs[len(running) :] + running
                for job in ended:
                    job.end = now
                    one.jobs.remove(job)
                    count += 1
                if not one.jobs:
                    self.free += one.nodes
                    group.remove(one)
                    released = True
        return count, released

    def new(self, size: int) -> NaiveSet:
        nodes = ceil(size / self.size)
        self.free -= nodes
        return NaiveSet(nodes, nodes * self.size // size)

    def join(self, job: NaiveJob) -> bool:
        group = self.sets[job.devices]
        tried = group.pop(0) if group else None
        if tried is not None:
            group.append(tried)
        if tried is None or tried.load + 1 >= tried.capacity:
            if ceil(job.devices / self.size) <= self.free:
                group.append(self.new(job.devices))
            elif tried is None:
                return False
            else:
                group.append(group.pop(0))
        self.add(job, group[-1], group)
        return True

    def add(self, job: NaiveJob, one: NaiveSet, group: list[NaiveSet]) -> None:
        one.load += 1
        one.jobs.append(job)
        group.sort(key=lambda one: one.load)

    def adjust(self) -> None:
        asked = {size: size * sum(len(one.jobs) for one in group) for size, group in self.sets.items()}
        has = {size: self.size * sum(one.nodes for one in group) for size, group in self.sets.items()}
        for size, group in self.sets.items():
            if not asked[size]:
                continue
            plan = floor(asked[size] / sum(asked.values()) * self.nodes * self.size)
            more = min(plan, asked[size]) - has[size]
            moved: list[NaiveJob] = []
            if more > 0:
                i = 0
                for i in range(1, ceil(more / size) + 1):
                    if ceil(size / self.size) <= self.free:
                        group.append(self.new(size))
                        i = group[-1].nodes - 1
                if i > 0:
                    for one in group:
                        moved, one.jobs, one.load = moved + one.jobs, [], 0
            for _ in range(min(ceil(-more / size), len(group) - 1) if more < 0 else 0):
                moved += group[0].jobs
                self.free += group.pop(0).nodes
            for job in moved:
                self.add(job, group[0], group)


@pytest.mark.parametrize("seed", range(20))
def test_random_traces(seed: int) -> None:
    draw = random.Random(seed)
    nodes, size, grid = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4, 8]), draw.choice([1, 7, 10, 60])
    jobs = sorted(
        (
            NaiveJob(
                draw.randrange(0, draw.choice([600, 3000]), grid),
                min(draw.choice([1, 1, 2, 4, 8, 16]), nodes * size),
                draw.choice([0, draw.randrange(grid, 900, grid), draw.randrange(1, 2000)]),
            )
            for _ in range(50)
        ),
        key=lambda job: job.submit,
    )
    Naive(nodes, size).run(jobs)
    trace = Trace(
        [str(i) for i in range(len(jobs))],
        [job.submit for job in jobs],
        [job.devices for job in jobs],
        [job.duration for job in jobs],
    )
    outcome = parse_peer("tiresias:gandiva/gandiva").prepare(trace, Cluster([size] * nodes)).run()
    assert outcome.first_start_s.tolist() == [job.start for job in jobs]
    assert outcome.finish_s.tolist() == [job.end for job in jobs]


def test_completions_wait_for_the_next_look() -> None:
    """A job of 3 s ends after 10 s; the next arrival is a look, too, and moves all later ones."""
    trace = Trace(["0", "1"], [0, 14], [1, 1], [3, 3])
    outcome = parse_peer("tiresias:gandiva/gandiva").prepare(trace, Cluster([4])).run()
    assert outcome.finish_s.tolist() == [10, 24]
    together = Trace(["0", "1"], [0, 4], [1, 1], [3, 3])
    outcome = parse_peer("tiresias:gandiva/gandiva").prepare(together, Cluster([4])).run()
    assert outcome.finish_s.tolist() == [4, 14]


def test_what_it_does_not_know_is_named() -> None:
    with pytest.raises(UsageError, match="job b asks for 3"):
        parse_peer("tiresias:gandiva/gandiva").prepare(
            Trace(["a", "b"], [0, 0], [1, 3], [5, 5]), Cluster([4])
        ).run()
    with pytest.raises(UsageError, match="one size"):
        parse_peer("tiresias:gandiva/gandiva").prepare(Trace(["a"], [0], [1], [5]), Cluster([4, 8]))
