"""Nodes that fall silent: what has not begun is taken back, and all else waits for as long as it may."""

from __future__ import annotations

import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.accounts import Activity
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Bring,
    Brought,
    Cancelled,
    Event,
    Exited,
    Moved,
    NodeFound,
    NodeLost,
    NodeSilent,
    RankGone,
    Submitted,
)
from gpuslice.sched_core.policy import Plan, Start, View
from gpuslice.wire import Hello, Suspend

from ..driver import PROGRAM, Driver, Scripted, notices, picture, told
from ..relocating import NODES, brings, kills, launches

WAIT_S = 100.0
#: What the shell says of a lost node, and what an agent says of a process that is gone with its machine.
LOST = Exited("a", -9, "gpuslice: node b was lost")
DIED = Exited("a", -9)


class Spread(Scripted):
    """Gives all devices to the first job that waits."""

    def plan(self, view: View) -> Plan:
        waiting = [job.id for job in view.waiting()]
        return Plan([Start(waiting[0], (0, 1))]) if waiting and view.free().total == 2 else Plan()


class OnB(Driver):
    """Job x runs on the device here, and job a on that of node b."""

    def __init__(self, *, max_restarts: int = 0, begins: bool = True) -> None:
        super().__init__(1, Scripted(), NODES)
        for name in "xa":
            spec = JobSpec(
                id=name, submit_s=0.0, max_restarts=max_restarts, wait_for_node_s=WAIT_S, grace_s=0.0
            )
            self.do(Submitted(spec, PROGRAM))
        self.job: Gang = self.core.jobs["a"]
        assert self.job.nodes == (1,)
        if begins:
            for name in "xa":
                self.hello(name)
                self.resumed(name)
                self.progress(name, 5)
            assert (self.job.state, self.job.lease) == (JobState.RUNNING, (1,))

    def end_x(self) -> None:
        self.do(Exited("x", 0))
        self.do(RankGone("x", 0))

    def is_replayed(self) -> None:
        assert picture(self.replayed(Scripted())) == picture(self.core)


@pytest.mark.parametrize("greeted", [False, True])
def test_what_has_not_begun_is_started_elsewhere_at_once(greeted: bool) -> None:
    driver = OnB()
    launched = [launch.nodes for name in "cd" for launch in launches(driver.submit(name))]
    assert launched == [("",), ("b",)]
    if greeted:
        driver.hello("d")
    commands = driver.do(NodeSilent("b"))
    assert [(kill.job, kill.at_once) for kill in kills(commands)] == [("d", True)]
    assert [notice.what for notice in notices(commands)] == ["taken_back"]
    if greeted:
        driver.do(RankGone("d", 0))
    commands = driver.do(Exited("d", -9, "gpuslice: node b was lost"))
    assert [launch.nodes for launch in launches(commands)] == [("",)]
    job = driver.core.jobs["d"]
    assert (job.attempt, job.failures, job.state) == (1, 0, JobState.QUEUED)
    driver.is_replayed()


def test_a_silent_node_gets_nothing_new() -> None:
    driver = OnB()
    driver.do(NodeSilent("b"))
    assert [launch.nodes for launch in launches(driver.submit("c"))] == [("",)]
    with pytest.raises(UsageError, match="nothing is heard of node b"):
        driver.do(Moved("x", ("b/null:0",)))


def test_a_command_without_a_hello_is_not_taken_back_when_it_may_be_at_work() -> None:
    driver = OnB(begins=False)
    driver.wake(60.0)
    assert not kills(driver.do(NodeSilent("b")))
    assert not kills(driver.do(NodeLost("b")))
    assert [kill.job for kill in kills(driver.wake(WAIT_S))] == ["a"]


def test_a_training_is_not_disturbed_by_a_silence() -> None:
    driver = OnB()
    assert not kills(driver.do(NodeSilent("b")))
    assert driver.job.wanted == (1,)
    assert not driver.job.shown, "the policy cannot plan with it"
    driver.wake(2.0)
    commands = driver.do(NodeFound("b", anew=False))
    assert not told(commands, Suspend)
    assert (driver.job.state, driver.job.placement, driver.job.running) == (JobState.RUNNING, (1,), True)
    driver.do(Exited("a", 1, "ConnectionResetError: x"))
    assert driver.job.verdict.absence is False
    driver.is_replayed()


def test_a_job_of_a_lost_node_waits_and_goes_on_there() -> None:
    driver = OnB()
    trained_s = driver.job.service_at(driver.now_s)
    driver.do(NodeSilent("b"))
    driver.do(NodeLost("b"))
    assert driver.job.activity is Activity.WAITS
    assert not kills(driver.wake(WAIT_S - 1.0))
    assert driver.job.service_at(driver.now_s) == trained_s
    driver.do(NodeFound("b"))
    assert driver.job.activity is Activity.TRAINS
    driver.progress("a", 9)
    assert (driver.job.state, driver.job.attempt, driver.job.lease) == (JobState.RUNNING, 0, (1,))
    driver.is_replayed()


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_after_its_wait_it_goes_on_from_what_other_nodes_have(max_restarts: int) -> None:
    driver = OnB(max_restarts=max_restarts)
    driver.do(NodeSilent("b"))
    driver.do(NodeLost("b"))
    driver.end_x()
    commands = driver.wake(WAIT_S)
    assert [notice.what for notice in notices(commands)] == ["went_without"]
    driver.do(RankGone("a", 0))
    assert brings(driver.do(LOST)) == [Bring("a", 1, ("",), ("",))]
    assert (driver.job.failures, driver.job.state) == (0, JobState.SUSPENDED)
    commands = driver.do(Brought("a", 1, "no living node has it", gone=True))
    assert [launch.attempt for launch in launches(commands)] == ([1] if max_restarts else [])
    assert driver.job.state is (JobState.SUSPENDED if max_restarts else JobState.FAILED)
    driver.is_replayed()


def test_until_the_lease_has_run_out_nothing_is_given_up() -> None:
    driver = OnB()
    driver.do(NodeSilent("b"))
    assert not kills(driver.wake(WAIT_S + 1.0))
    assert not kills(driver.do(NodeLost("b")))
    assert kills(driver.wake(0.1))


@pytest.mark.parametrize("max_restarts", [0, 1])
@pytest.mark.parametrize("silence", [(), (NodeSilent("b"),), (NodeSilent("b"), NodeLost("b"))])
def test_no_restart_is_spent_on_a_machine_that_was_started_anew(
    silence: tuple[Event, ...], max_restarts: int
) -> None:
    driver = OnB(max_restarts=max_restarts)
    for event in silence:
        driver.do(event)
    driver.do(NodeFound("b"))
    driver.do(RankGone("a", 0, unseen=True))
    driver.do(DIED)
    assert driver.job.state is (JobState.QUEUED if max_restarts else JobState.FAILED)
    assert (driver.job.attempt, driver.job.failures) == (max_restarts, 0)
    if max_restarts:
        assert [launch.nodes for launch in launches(driver.wake(2.0))] == [("b",)]


def test_a_process_that_has_greeted_fails_as_any_other() -> None:
    driver = OnB(max_restarts=1)
    driver.do(NodeSilent("b"))
    driver.do(NodeFound("b"))
    again = Hello(version=1, job="a", rank=0, world_size=1, pid=1, boundary=5, epoch=driver.job.epoch)
    driver.say("a", again)
    driver.do(RankGone("a", 0))
    driver.do(DIED)
    assert driver.job.failures == 1


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "not noticed yet"])
def test_a_gang_that_failed_because_a_node_is_silent_waits_for_its_state(noticed: bool) -> None:
    driver = Driver(1, Spread(), NODES)
    spec = JobSpec(id="g", submit_s=0.0, devices=2, max_restarts=1, wait_for_node_s=WAIT_S)
    driver.do(Submitted(spec, PROGRAM))
    job = driver.core.jobs["g"]
    driver.hello("g")
    for rank in range(2):
        driver.resumed("g", rank)
        driver.progress("g", 5, rank)
    if noticed:
        driver.do(NodeSilent("b"))
    driver.do(RankGone("g", 0))
    driver.do(Exited("g", 1, "ConnectionResetError: peer", node=""))
    if not noticed:
        driver.do(NodeSilent("b"))
    driver.do(NodeLost("b"))
    driver.do(RankGone("g", 1))
    driver.do(Exited("g", -9, "gpuslice: node b was lost", node="b"))
    assert (job.state, job.attempt, job.failures) == (JobState.QUEUED, 1, 0)
    assert not launches(driver.wake(10.0)), "its state is on the node"
    assert [launch.nodes for launch in launches(driver.do(NodeFound("b")))] == [("", "b")]


def test_a_gang_of_which_a_command_has_failed_goes_on_without_a_node_that_stays_away() -> None:
    driver = Driver(1, Spread(), NODES)
    spec = JobSpec(id="g", submit_s=0.0, devices=2, max_restarts=1, wait_for_node_s=0.0)
    driver.do(Submitted(spec, PROGRAM))
    driver.hello("g")
    for rank in range(2):
        driver.resumed("g", rank)
        driver.progress("g", 5, rank)
    driver.do(RankGone("g", 0))
    driver.do(Exited("g", 1, "ConnectionResetError: peer", node=""))
    driver.do(NodeLost("b"))
    driver.do(RankGone("g", 1))
    driver.do(Exited("g", -9, "gpuslice: node b was lost", node="b"))
    assert [notice.what for notice in notices(driver.wake(10.0))].count("went_without") == 1
    assert driver.core.jobs["g"].command.first_code == 0


def test_a_job_that_is_cancelled_ends_on_a_lost_node_at_once() -> None:
    driver = OnB()
    driver.do(NodeSilent("b"))
    driver.do(NodeLost("b"))
    assert kills(driver.do(Cancelled("a", "enough")))
    driver.do(RankGone("a", 0))
    driver.do(LOST)
    assert (driver.job.state, driver.job.processes_gone) == (JobState.CANCELLED, True)
