"""Which snapshots of a job are copied, and where to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest

from gpuslice.daemon.replicas import Replicas
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.lifecycle.events import Held, NodeLost, Noted, Released, Reported, Submitted
from gpuslice.sched_core.nodes.transfers import Done, Transfers, Waiting
from gpuslice.wire import Progress

from ...sched_core.driver import PROGRAM, Driver, suspended


class Noting(Transfers):
    """Brings nothing, and keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__(lambda job, sources, targets: [])
        self.asked: list[tuple[str, list[str], list[str]]] = []
        self.done: list[Done] = []

    def begin(
        self,
        job: str,
        sources: Sequence[str],
        targets: Sequence[str],
        done: Done,
        waiting: Waiting | None = None,
        gone: Done | None = None,
    ) -> None:
        assert waiting is gone is None
        self.asked.append((job, list(sources), list(targets)))
        self.done.append(done)

    def under_way(self, job: str) -> bool:
        return bool(self.done)


class Bench:
    """A job on the scheduler's node, that its owner suspends again and again; there are two other nodes."""

    def __init__(self) -> None:
        self.driver = Driver(1, None, ("", "b", "c"))
        self.transfers = Noting()
        self.notes: list[Noted] = []
        self.replicas = Replicas(
            self.driver.core, 2, self.transfers, self.notes.append, lambda: self.driver.now_s
        )
        self.driver.submit("a")
        self.driver.hello("a")
        self.boundary = 0

    def park(self, times: int = 1, *, restartable: bool = True) -> None:
        driver, job = self.driver, self.driver.core.jobs["a"]
        for _ in range(times):
            self.boundary += 10
            driver.resumed("a")
            driver.progress("a", self.boundary)
            driver.do(Held("a"))
            report = suspended(job.epoch, self.boundary + 1)
            event = Reported("a", 0, msgspec.structs.replace(report, restartable=restartable))
            driver.do(event)
            self.replicas.see(event)
            driver.do(Released("a"))

    def save(self, boundary: int) -> None:
        event = Reported("a", 0, Progress(epoch=1, boundary=boundary + 1, step=boundary, saved=boundary))
        self.driver.do(event)
        self.replicas.see(event)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.transfers.close()


def test_every_second_one_goes_to_the_next_node(bench: Bench) -> None:
    bench.park()
    assert bench.transfers.asked == []
    bench.park()
    assert bench.transfers.asked == [("a", [""], ["b"])]
    bench.driver.now_s += 2.0
    bench.transfers.done.pop()("")
    assert bench.notes == [Noted("replicated", "a", {"from": "here", "to": "b", "age_s": 2.0})]
    bench.park(2)
    assert len(bench.transfers.asked) == 2


def test_one_that_falls_due_while_another_is_on_its_way_is_not_forgotten(bench: Bench) -> None:
    bench.park(4)
    assert len(bench.transfers.asked) == 1
    bench.transfers.done.pop()("no room")
    assert bench.notes == [Noted("not_replicated", "a", {"to": "b"})]
    bench.park()
    assert len(bench.transfers.asked) == 2


def test_checkpoints_are_copied_while_a_job_trains(bench: Bench) -> None:
    bench.driver.resumed("a")
    for boundary in (10, 10, 20, 20):
        bench.save(boundary)
    assert bench.transfers.asked == [("a", [""], ["b"])]


def test_a_snapshot_that_nobody_could_go_on_from_is_not_copied(bench: Bench) -> None:
    bench.park(4, restartable=False)
    assert bench.transfers.asked == []


def test_nothing_is_sent_to_a_lost_node(bench: Bench) -> None:
    bench.driver.do(NodeLost("b"))
    bench.park(2)
    assert bench.transfers.asked == [("a", [""], ["c"])]


def test_of_an_elastic_job_the_snapshot_of_rank_0_goes() -> None:
    driver, transfers = Driver(2, None, ("", "b")), Noting()
    replicas = Replicas(driver.core, 1, transfers, lambda note: None, lambda: driver.now_s)
    driver.do(Submitted(JobSpec(id="a", submit_s=0.0, most_devices=2), PROGRAM))
    driver.hello("a")
    driver.resumed("a")
    driver.progress("a", 5)
    driver.do(Held("a"))
    report = suspended(driver.core.jobs["a"].epoch, 6)
    event = Reported("a", 0, msgspec.structs.replace(report, restartable=True))
    driver.do(event)
    replicas.see(event)
    assert transfers.asked == [("a", [""], ["b"])]
    transfers.close()
