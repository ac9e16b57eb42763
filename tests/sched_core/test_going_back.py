"""A job whose state cannot be brought to another node, for lack of room or else, goes back and goes on."""

from __future__ import annotations

import msgspec

from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Brought, Command, Exited, Moved, RankGone
from gpuslice.sched_core.policies.fifo import Fifo

from .driver import Driver, notices, suspended
from .relocating import NODES, brings, kills, launches

FULL = "No space left on device: 1.0 MB are free, 204 MB are needed"


def trains(driver: Driver, job: str, boundary: int) -> None:
    """``job``, which was told to come, trains."""
    driver.resumed(job)
    driver.progress(job, boundary)
    assert driver.state(job) is JobState.RUNNING


def on_its_way() -> Driver:
    """The owner of job a, which is on this node, has sent it to b. Its processes have ended here."""
    driver = Driver(1, Fifo(), NODES)
    driver.submit("a")
    driver.now_s += 2.0
    driver.hello("a")
    trains(driver, "a", 10)
    driver.do(Moved("a", ("b/null:0",)))
    report = suspended(driver.core.jobs["a"].epoch, 11)
    (kill,) = kills(driver.say("a", msgspec.structs.replace(report, restartable=True)))
    assert kill.job == "a"
    driver.do(RankGone("a", 0))
    assert brings(driver.do(Exited("a", -9)))
    return driver


def back(driver: Driver) -> list[Command]:
    """There is no room for a on b. Return what follows until it is started on this node."""
    commands = driver.do(Brought("a", 1, FULL))
    assert driver.state("a") is JobState.SUSPENDED
    assert [kill.job for kill in kills(commands)] == ["a"]
    commands += driver.do(Exited("a", -9))
    assert [(launch.job, launch.nodes) for launch in launches(commands)] == [("a", ("",))]
    return commands


def test_it_goes_on_where_its_state_is_and_says_why() -> None:
    driver = on_its_way()
    (note,) = [note for note in notices(back(driver)) if note.what == "not_moved"]
    assert note.details == {"to": "b", "again": False, "reason": FULL}
    driver.hello("a")
    assert driver.core.jobs["a"].lease == (0,)
    trains(driver, "a", 12)
    assert driver.core.jobs["a"].failures == 0
    assert not kills(driver.wake(1.0)), "it stays"


def test_others_have_the_devices_of_the_node_without_room() -> None:
    driver = on_its_way()
    driver.submit("x")
    driver.hello("x")
    trains(driver, "x", 1)
    assert driver.core.jobs["x"].lease == (0,)
    driver.submit("y")
    driver.now_s += 2.0
    driver.hello("y")
    assert driver.state("y") is JobState.QUEUED, "the device of node b is a's"
    back(driver)
    driver.wake(0.0)
    assert driver.core.jobs["y"].wanted == (1,)
    assert not driver.core.jobs["a"].wanted
    driver.hello("a")
    driver.do(Exited("x", 0))
    driver.do(RankGone("x", 0))
    assert driver.core.jobs["a"].lease == (0,)


def test_without_its_state_anywhere_it_fails() -> None:
    driver = on_its_way()
    driver.core.jobs["a"].state_nodes = ()
    driver.do(Brought("a", 1, FULL))
    assert driver.state("a") is JobState.FAILED
