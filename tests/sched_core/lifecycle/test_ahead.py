"""The process of a job that goes to another node is started there ahead, and ended if that was in vain."""

from __future__ import annotations

import msgspec
import pytest

from gpuslice.errors import IllegalTransitionError
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.ahead import AHEAD_S
from gpuslice.sched_core.lifecycle.events import (
    Brought,
    Cancelled,
    Command,
    Event,
    Exited,
    GiveUpAhead,
    Launch,
    Moved,
    RankGone,
    StartAhead,
    WaitsAhead,
)
from gpuslice.sched_core.policy import Start, Suspend
from gpuslice.wire import Suspend as Stop

from ..driver import Driver, picture, suspended, told
from ..relocating import Quiet, begun, brings, launches, plan

NODES = ("", "b", "c")


class Case:
    """Job a trains on device 0 and goes to node b. After each event a replay knows the same."""

    def __init__(self) -> None:
        self.policy = Quiet()
        self.driver = Driver(1, self.policy, NODES, starts_ahead=True)
        begun(self.policy, self.driver, "a")
        self.job = self.driver.core.jobs["a"]
        assert ahead(self.do(Moved("a", ("b/null:0",)))) == [StartAhead("a", 1, "b")]
        assert self.trains

    def do(self, event: Event) -> list[Command]:
        commands = self.driver.do(event)
        replayed = self.driver.replayed(Quiet(again=self.policy.made))
        assert picture(replayed) == picture(self.driver.core), "replayed it is another core"
        return commands

    @property
    def trains(self) -> bool:
        """True if the job trains and is not told to stop."""
        return self.job.state is JobState.RUNNING

    def park(self) -> list[Command]:
        """The job parks with a state that can be sent; its processes are killed."""
        report = suspended(self.job.epoch, self.job.asked.stop_at)
        self.driver.say("a", msgspec.structs.replace(report, restartable=True))
        self.do(RankGone("a", 0))
        return self.do(Exited("a", -9))


def ahead(commands: list[Command]) -> list[Command]:
    """Return the orders about processes that are started ahead, and launches."""
    return [one for one in commands if isinstance(one, StartAhead | GiveUpAhead | Launch)]


@pytest.fixture
def case() -> Case:
    return Case()


def test_the_job_trains_until_its_process_waits_and_that_is_launched_when_the_state_is_there(
    case: Case,
) -> None:
    assert told(case.do(WaitsAhead("a", 1)), Stop)
    assert not case.trains
    commands = case.park()
    assert (len(brings(commands)), ahead(commands)) == (1, [])
    (launched,) = ahead(case.do(Brought("a", 1)))
    assert isinstance(launched, Launch)
    assert (launched.attempt, launched.nodes) == (1, ("b",))
    assert case.job.relocation.ahead is None


def test_it_does_not_wait_for_ever_for_a_process_of_which_nothing_is_heard(case: Case) -> None:
    assert not told(case.driver.wake(AHEAD_S - 1.0), Stop)
    assert told(case.driver.wake(1.0), Stop)
    assert ahead(case.park()) == []
    assert len(launches(case.do(Brought("a", 1)))) == 1


def test_one_that_stays_after_all_has_its_process_ended(case: Case) -> None:
    assert ahead(case.do(Moved("a", ("null:0",)))) == [GiveUpAhead("a", "b")]
    assert case.trains
    assert ahead(case.do(Moved("a", ("b/null:0",)))) == [StartAhead("a", 1, "b")]


def test_another_goal_has_another_process_and_the_job_waits_no_longer(case: Case) -> None:
    case.driver.wake(AHEAD_S - 1.0)
    assert ahead(case.do(Moved("a", ("c/null:0",)))) == [GiveUpAhead("a", "b"), StartAhead("a", 1, "c")]
    assert told(case.driver.wake(1.0), Stop)


@pytest.mark.parametrize("when", ["trains", "parks", "brings"])
def test_a_cancelled_job_has_its_process_ended(when: str, case: Case) -> None:
    if when != "trains":
        case.do(WaitsAhead("a", 1))
    if when == "brings":
        case.park()
    assert ahead(case.do(Cancelled("a", "enough"))) == [GiveUpAhead("a", "b")]


def test_a_state_that_cannot_be_brought_has_its_process_ended_and_goes_on_where_it_is(case: Case) -> None:
    case.do(WaitsAhead("a", 1))
    case.park()
    case.do(Brought("a", 1, "no room"))
    first, launched = ahead(case.do(Exited("a", -9, attempt=1)))
    assert first == GiveUpAhead("a", "b")
    assert isinstance(launched, Launch)
    assert (launched.attempt, launched.nodes) == (2, ("",))


def test_a_parked_job_has_its_process_started_while_its_state_is_brought(case: Case) -> None:
    policy, driver = case.policy, case.driver
    case.do(Moved("a", ("null:0",)))
    plan(driver, policy, Suspend("a"))
    report = suspended(case.job.epoch, case.job.asked.stop_at)
    driver.say("a", msgspec.structs.replace(report, restartable=True))
    case.do(Moved("a", ("b/null:0",)))
    plan(driver, policy, Start("a", (0,)))
    driver.do(RankGone("a", 0))
    assert ahead(driver.do(Exited("a", -9))) == [StartAhead("a", 1, "b")]
    (launched,) = ahead(driver.do(Brought("a", 1)))
    assert isinstance(launched, Launch)


def test_an_answer_for_which_nobody_waits_is_refused(case: Case) -> None:
    before = picture(case.driver.core)
    with pytest.raises(IllegalTransitionError):
        case.driver.do(WaitsAhead("a", 0))
    assert picture(case.driver.core) == before
