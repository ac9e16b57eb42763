"""The live core moves scattered gangs together when a job leaves."""

from __future__ import annotations

import msgspec
import pytest

from gpuslice import wire
from gpuslice.errors import UsageError
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Bring, Brought, Exited, RankGone
from gpuslice.sched_core.policies.registry import make_policy

from .driver import Driver, picture, suspended, told
from .relocating import brings, launches

OPTIONS = {"defragment": "true", "apart_sockets": "1.5"}


def scattered(options: dict[str, str]) -> Driver:
    """Job a trains on device 0, gang g on devices 1 and 2, which are on two sockets."""
    driver = Driver(4, make_policy("fifo", options), sockets=2)
    for job, ranks in (("a", 1), ("g", 2)):
        driver.submit(job, ranks)
        driver.hello(job)
        for rank in range(ranks):
            driver.resumed(job, rank)
            driver.progress(job, 10, rank)
    assert driver.core.jobs["g"].lease == (1, 2)
    return driver


def leave(driver: Driver, after_s: float) -> list[object]:
    """Job a ends ``after_s`` from now."""
    driver.now_s += after_s
    return [*driver.do(RankGone("a", 0)), *driver.do(Exited("a", 0))]


def test_a_gang_moves_onto_one_socket_and_its_journal_tells_the_same() -> None:
    driver = scattered(OPTIONS)
    commands = leave(driver, 130.0)  # a switch is taken to cost 62 s, and half of 130 s can be saved
    assert {rank for _, rank, _ in told(commands, wire.Suspend)} == {0, 1}
    assert driver.core.jobs["g"].placement == (1, 0)
    for rank in (0, 1):
        driver.parked("g", driver.core.jobs["g"].asked.stop_at, rank)
    for rank in (0, 1):
        driver.resumed("g", rank)
    gang = driver.core.jobs["g"]
    assert (gang.state, gang.lease, gang.migrations) == (JobState.RUNNING, (1, 0), 1)
    assert picture(driver.replayed(make_policy("fifo", OPTIONS))) == picture(driver.core)


def test_a_gang_on_two_nodes_is_started_on_one_with_its_snapshots() -> None:
    driver = Driver(2, make_policy("fifo", {"defragment": "true", "apart_nodes": "1.5"}), ("", "b"))
    for job in "ac":
        driver.submit(job)
        driver.hello(job)
        driver.resumed(job)
        driver.progress(job, 10)
    driver.submit("g", 2)
    driver.hello("g")
    assert not begun_anew(driver)
    for rank in (0, 1):
        driver.progress("g", 10, rank)
    gang = driver.core.jobs["g"]
    assert (gang.lease, gang.nodes) == ((1, 3), (0, 1))
    leave(driver, 120.0)
    assert gang.placement == (1, 3), "half of 120 s is less than a move is taken to cost"
    driver.now_s += 10.0
    driver.do(RankGone("c", 0))
    driver.do(Exited("c", 0))
    for rank in (0, 1):
        parked = suspended(gang.epoch, gang.asked.stop_at)
        driver.say("g", msgspec.structs.replace(parked, restartable=True), rank)
    (bring,) = begun_anew(driver)
    assert (bring.sources, bring.targets) == (("", "b"), ("", ""))
    assert (gang.state, gang.nodes, gang.failures) == (JobState.RUNNING, (0, 0), 0)


def begun_anew(driver: Driver) -> list[Bring]:
    """Gang g's processes end, and others begin; return the orders to bring its state before."""
    for rank in (0, 1):
        driver.do(RankGone("g", rank))
    commands = driver.do(Exited("g", -9))
    brought = brings(commands)
    for bring in brought:
        commands += driver.do(Brought("g", bring.attempt))
    assert [launch.job for launch in launches(commands)] == ["g"]
    driver.hello("g")
    for rank in (0, 1):
        driver.resumed("g", rank)
    return brought


@pytest.mark.parametrize(("options", "after_s"), [(OPTIONS, 120.0), ({}, 130.0)])
def test_it_stays_where_that_does_not_pay_or_is_not_wanted(options: dict[str, str], after_s: float) -> None:
    driver = scattered(options)
    assert not told(leave(driver, after_s), wire.Suspend)
    assert driver.core.jobs["g"].placement == (1, 2)


def test_what_a_switch_was_measured_to_cost_counts() -> None:
    driver = scattered(OPTIONS)
    gang = driver.core.jobs["g"]
    driver.core.state.switch_costs.parked(
        gang, 0, wire.Suspended(epoch=1, boundary=1, step=1, nbytes=8, stages_s={"copy_out_s": 1.0})
    )
    assert driver.core.state.switch_costs.expected_s(gang, (1, 0)) == pytest.approx(1.0)
    assert told(leave(driver, 3.0), wire.Suspend)


def test_sockets_are_equal_parts() -> None:
    with pytest.raises(UsageError, match="3 devices do not lie on 2 sockets"):
        Driver(3, sockets=2)
