"""Which nodes are told that a job is over, and what they remove then."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuslice.nodes.leftovers import Leftovers, forget
from gpuslice.sched_core.lifecycle.events import (
    Cancelled,
    Event,
    Exited,
    NodeFound,
    NodeSilent,
    RankGone,
    Requeued,
)

from ...patience import PATIENCE_S
from ...sched_core.driver import Driver
from .synthetic import storages, take


class Site:
    """A job that trains on the scheduler's node, and node b, whose agent is connected if ``joined``."""

    def __init__(self) -> None:
        self.driver = Driver(1, None, ("", "b"))
        self.told: list[tuple[str, tuple[str, ...]]] = []
        self.b = SimpleNamespace(joined=True, tell=lambda message: self.told.append(("b", message.jobs)))
        self.driver.submit("a")
        self.driver.hello("a")
        self.driver.resumed("a")
        self.driver.progress("a", 5)
        self.leftovers = self.begin()

    def begin(self) -> Leftovers:
        others = cast(Any, {"b": self.b})
        return Leftovers(self.driver.core, lambda jobs: self.told.append(("", tuple(jobs))), others)

    def do(self, *events: Event) -> None:
        for event in events:
            self.driver.do(event)
            self.leftovers.see(event)
            self.leftovers.tell()


GONE = (RankGone("a", 0), Exited("a", -15))
TOLD = [("", ("a",)), ("b", ("a",))]


def test_all_nodes_are_told_once_nothing_is_left_of_a_cancelled_job() -> None:
    site = Site()
    site.do(Cancelled("a", "enough"), GONE[0])
    assert site.told == []
    site.do(GONE[1])
    assert site.told == TOLD
    site.leftovers.tell()
    assert site.told == TOLD


def test_a_job_that_ended_well_is_over_and_one_that_failed_is_not() -> None:
    site = Site()
    site.do(GONE[0], Exited("a", 0))
    assert site.told == TOLD
    site = Site()
    site.do(GONE[0], Exited("a", 1))
    assert site.told == []


def test_a_node_that_was_away_is_told_when_it_is_back() -> None:
    site = Site()
    site.b.joined = False
    site.do(NodeSilent("b"), Cancelled("a", "enough"), *GONE)
    assert site.told == TOLD[:1]
    site.b.joined = True
    site.do(NodeFound("b", anew=True))
    assert site.told == TOLD


def test_a_node_that_was_away_is_not_told_of_a_job_that_its_owner_wants_again() -> None:
    site = Site()
    site.b.joined = False
    site.do(NodeSilent("b"), Cancelled("a", "enough"), *GONE, Requeued("a"))
    site.b.joined = True
    site.do(NodeFound("b", anew=True))
    assert site.told == TOLD[:1]


def test_a_new_scheduler_tells_all_nodes_again() -> None:
    site = Site()
    site.do(Cancelled("a", "enough"), *GONE)
    site.begin().tell()
    assert site.told == 2 * TOLD


def test_only_what_the_jobs_of_this_scheduler_left_is_removed(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ramdisk, ours = shm / "disk", shm / "ours"
    monkeypatch.setenv("GPUSLICE_RAMDISK_DIR", str(ramdisk))
    for directory in (ours, shm / "theirs"):
        for job in ("over", "other"):
            take(ramdisk, job, 4, [storages(0)], scheduler=os.path.realpath(directory))
    take(ramdisk, "over", 4, [storages(0)])
    before = {path.name for path in ramdisk.glob("*.r0")}
    forget(ours, ["over", "no-job-of-these"])
    ends_s = time.monotonic() + PATIENCE_S
    while len(left := {path.name for path in ramdisk.glob("*.r0")}) == len(before):
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    (removed,) = before - left
    assert removed.startswith("over@")
    assert len(before) == 5
