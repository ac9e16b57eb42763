"""Which copy of a job's state on another node counts, and how old it is."""

from __future__ import annotations

import os

import msgspec

from gpuslice.sched_core.lifecycle.events import Moved, NodeFound, NodeSilent, Noted
from gpuslice.sched_core.live.status import Overview

from ..driver import Driver, Scripted, suspended
from ..relocating import brought, on_its_way, one_begun


def trained() -> Driver:
    """Return a driver whose job a trains on node b of three. A snapshot of it came to node c, 2 s old."""
    driver = Driver(1, Scripted(), ("b", "c", "d"))
    driver.submit("a")
    driver.hello("a")
    driver.resumed("a")
    driver.progress("a", 5)
    driver.do(Noted("replicated", "a", {"from": "b", "to": "c", "age_s": 2.0}))
    driver.now_s += 10.0
    return driver


def seen(driver: Driver) -> tuple[str | None, float | None]:
    overview = Overview(driver.core, driver.job_history, policy="scripted", pid=os.getpid())
    info = overview.job(driver.core.jobs["a"], driver.now_s)
    return info.copy_on, info.copy_age_s


def test_the_newest_copy_counts_from_the_moment_of_its_snapshot() -> None:
    driver = trained()
    assert seen(driver) == ("c", 12.0)
    driver.do(Noted("not_replicated", "a", {"to": "c"}))
    assert seen(driver) == ("c", 12.0)
    driver.do(Noted("replicated", "a", {"from": "b", "to": "d", "age_s": 1.0}))
    assert seen(driver) == ("d", 1.0)


def test_a_copy_on_a_node_that_has_been_silent_does_not_count() -> None:
    driver = trained()
    driver.do(NodeSilent("d"))
    assert seen(driver) == ("c", 12.0)
    driver.do(NodeSilent("c"))
    driver.do(NodeFound("c", anew=False))
    assert seen(driver) == (None, None)


def test_a_job_whose_node_is_silent_says_how_old_its_copy_is() -> None:
    driver = trained()
    driver.do(NodeSilent("b"))
    assert seen(driver) == ("c", 12.0)
    overview = Overview(driver.core, driver.job_history, policy="scripted", pid=os.getpid())
    assert str(overview.job(driver.core.jobs["a"], driver.now_s).why).endswith("; its copy on c is 12 s old")


def test_a_job_that_has_moved_to_its_copy_has_none_elsewhere() -> None:
    _, driver = one_begun()
    driver.do(Noted("replicated", "a", {"from": "here", "to": "b", "age_s": 0.0}))
    assert seen(driver)[0] == "b"
    driver.do(Moved("a", ("b/null:0",)))
    report = suspended(driver.core.jobs["a"].epoch, 11)
    driver.say("a", msgspec.structs.replace(report, restartable=True))
    on_its_way(driver)
    brought(driver)
    assert seen(driver)[0] == "b", "its state is where it trained"
    driver.hello("a")
    driver.resumed("a")
    driver.progress("a", 13)
    assert seen(driver) == (None, None)
