"""The start of a command in each order in which its answers, and what goes wrong, can come."""

from __future__ import annotations

import msgspec
import pytest

from gpuslice.errors import IllegalTransitionError
from gpuslice.sched_core.jobs.command import Purpose, Stage
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Bring,
    Brought,
    Cancelled,
    Command,
    Event,
    Exited,
    FindPort,
    Held,
    Kill,
    Launch,
    Moved,
    NodeFound,
    NodeLost,
    NodeSilent,
    PortFound,
    StateWaits,
)
from gpuslice.sched_core.policy import Start

from ..driver import PROGRAM, Driver, notices, picture
from ..relocating import NODES, Quiet, kills, launches, on_its_way, one_parked, plan

LOST = Exited("a", -9, "gpuslice: node b was lost")


class Case:
    """Job a, whose state is brought to node b. After each event a replay of the journal knows the same."""

    def __init__(self) -> None:
        self.policy, self.driver = one_parked(restartable=True)
        plan(self.driver, self.policy, Start("a", (1,)))
        assert on_its_way(self.driver) == Bring("a", 1, ("",), ("b",))
        self.job = self.driver.core.jobs["a"]
        assert self.job.command.stage is Stage.BRINGING

    def do(self, event: Event) -> list[Command]:
        commands = self.driver.do(event)
        replayed = self.driver.replayed(Quiet(again=self.policy.made))
        assert picture(replayed) == picture(self.driver.core), "replayed it is another core"
        return commands

    def refuses(self, event: Event) -> None:
        """The core refuses ``event``, and nothing has changed."""
        before = picture(self.driver.core)
        with pytest.raises(IllegalTransitionError):
            self.driver.do(event)
        assert picture(self.driver.core) == before

    def is_over(self) -> None:
        """The attempt has ended, and no answer is taken any more."""
        assert not self.job.command.runs
        for answer in (
            Brought("a", 1),
            Brought("a", 1, "no room"),
            StateWaits("a", 1, "b", "no answer"),
            LOST,
        ):
            self.refuses(answer)


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_command_is_launched_once_when_its_state_is_there(case: Case) -> None:
    assert launches(case.do(Brought("a", 1))) == [Launch("a", PROGRAM, 1, ("b",))]
    assert case.job.command.stage is Stage.STARTED
    case.refuses(Brought("a", 1))
    case.refuses(StateWaits("a", 1, "b", "no answer"))


@pytest.mark.parametrize("attempt", [0, 2])
def test_an_answer_for_another_attempt_is_refused(case: Case, attempt: int) -> None:
    case.refuses(Brought("a", attempt))
    case.refuses(StateWaits("a", attempt, "b", "no answer"))
    case.refuses(PortFound("a", 1, 4242))


def test_why_a_state_waits_is_known_until_it_is_there(case: Case) -> None:
    for reason in ("no answer", "still none"):
        assert not launches(case.do(StateWaits("a", 1, "b", reason)))
        assert case.job.command.unreachable == reason
    assert launches(case.do(Brought("a", 1)))
    assert case.job.command.unreachable == ""


def test_a_job_whose_state_cannot_be_brought_is_started_where_the_state_is(case: Case) -> None:
    commands = case.do(Brought("a", 1, "no room"))
    assert not launches(commands)
    assert [kill.job for kill in kills(commands)] == ["a"]
    case.refuses(PortFound("a", 1, 4242))
    assert launches(case.do(Exited("a", -9))) == [Launch("a", PROGRAM, 2, ("",))]
    assert case.job.state is JobState.SUSPENDED


def test_a_state_that_cannot_be_brought_from_a_lost_node_is_a_failure_of_the_infrastructure(
    case: Case,
) -> None:
    case.do(NodeLost(""))
    commands = case.do(Brought("a", 1, "no room"))
    assert not launches(commands)
    assert (case.job.state, case.job.verdict.failure) == (JobState.FAILED, "infrastructure")
    assert case.job.verdict.reason == "gpuslice: its state could not be brought to b: no room"
    case.is_over()


@pytest.mark.parametrize("brought", [False, True])
@pytest.mark.parametrize("silent", [NodeSilent("b"), NodeLost("b")])
def test_a_command_that_has_not_begun_is_taken_back_from_a_silent_node(
    case: Case, brought: bool, silent: Event
) -> None:
    if brought:
        assert launches(case.do(Brought("a", 1)))
    assert Kill("a", "node b does not answer", 1, Purpose.RELOCATE) in case.do(silent)
    assert launches(case.do(LOST)) == [Launch("a", PROGRAM, 2, ("",))]
    assert (case.job.failures, case.job.state) == (0, JobState.SUSPENDED)
    case.refuses(Brought("a", 1))


def test_a_state_that_is_there_as_its_node_is_found_again(case: Case) -> None:
    """The command was taken back, but the shell has not said that it is gone: it is not launched there."""
    case.do(NodeLost("b"))
    case.do(NodeFound("b"))
    assert launches(case.do(Brought("a", 1))) == [Launch("a", PROGRAM, 2, ("",))]


def test_a_state_that_no_node_has_is_not_waited_for(case: Case) -> None:
    """Its owner allows another attempt, so it begins anew. No restart is spent on that."""
    case.job.spec = msgspec.structs.replace(case.job.spec, max_restarts=1)
    commands = case.driver.do(Brought("a", 1, "no living node has it", gone=True))
    assert launches(commands) == [Launch("a", PROGRAM, 1, ("b",))]
    assert [notice.what for notice in notices(commands)] == ["begins_anew"]
    assert (case.job.failures, case.job.state_nodes) == (0, ())


@pytest.mark.parametrize("answer", [Exited("a", -9), Brought("a", 1), Brought("a", 1, "it was given up")])
def test_a_job_that_is_cancelled_meanwhile_is_not_launched(case: Case, answer: Event) -> None:
    assert kills(case.do(Cancelled("a", "enough"))) == [Kill("a", "enough", 1, Purpose.CANCEL)]
    assert not launches(case.do(answer))
    assert (case.job.state, case.job.processes_gone) == (JobState.CANCELLED, True)
    case.is_over()


def test_a_job_that_is_cancelled_when_it_is_launched_ends_with_its_command(case: Case) -> None:
    assert launches(case.do(Brought("a", 1)))
    assert kills(case.do(Cancelled("a", "enough")))
    assert not case.job.processes_gone
    case.do(Exited("a", -15))
    assert case.job.processes_gone
    case.is_over()


@pytest.mark.parametrize("answer", [Exited("a", -9), Brought("a", 1), Brought("a", 1, "it was given up")])
@pytest.mark.parametrize("waited", [False, True])
def test_a_job_that_its_owner_moves_back_meanwhile_is_launched_there(
    case: Case, answer: Event, waited: bool
) -> None:
    if waited:
        case.do(StateWaits("a", 1, "b", "no answer"))
    orders = kills(case.do(Moved("a", ("null:0",))))
    assert orders == [Kill("a", "it goes to another node", 1, Purpose.RELOCATE)]
    assert launches(case.do(answer)) == [Launch("a", PROGRAM, 2, ("",))]
    assert (case.job.attempt, case.job.failures, case.job.command.stage) == (2, 0, Stage.STARTED)
    case.refuses(Brought("a", 1))


def test_a_job_that_is_held_meanwhile_is_launched_and_waits(case: Case) -> None:
    case.do(Held("a"))
    assert launches(case.do(Brought("a", 1)))


def gang(policy: Quiet) -> Driver:
    """Gang g waits for the port at which its ranks on two nodes meet."""
    driver = Driver(1, policy, NODES)
    driver.finds_ports = False
    assert [command for command in driver.submit("g", 2) if isinstance(command, FindPort | Launch)] == [
        FindPort("g", 0, "")
    ]
    return driver


def test_a_gang_on_two_nodes_is_launched_when_its_port_is_found() -> None:
    policy = Quiet()
    driver = gang(policy)
    assert picture(driver.replayed(Quiet(again=policy.made))) == picture(driver.core)
    found = PortFound("g", 0, 4242)
    assert launches(driver.do(found)) == [Launch("g", PROGRAM, 0, ("", "b"), 4242)]
    assert picture(driver.replayed(Quiet(again=policy.made))) == picture(driver.core)
    with pytest.raises(IllegalTransitionError):
        driver.do(found)


@pytest.mark.parametrize("answer", [Exited("g", -9), PortFound("g", 0, 4242)])
def test_a_gang_that_is_cancelled_before_its_port_is_found_is_not_launched(answer: Event) -> None:
    driver = gang(Quiet())
    driver.do(Cancelled("g", "enough"))
    assert not launches(driver.do(answer))
    assert driver.core.jobs["g"].processes_gone


Ends = list[tuple[str, int]]


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([("", 0), ("b", 0)], 0),
        ([("b", 0), ("", 0)], 0),
        ([("", 1), ("b", -15)], 1),
        ([("b", -9), ("", -15)], -9),
        ([("b", 0), ("", 3)], 3),
    ],
)
def test_a_gang_ends_as_its_first_command_that_failed(ends: Ends, code: int) -> None:
    driver = gang(Quiet())
    driver.do(PortFound("g", 0, 4242))
    job = driver.core.jobs["g"]
    (first, first_code), (last, last_code) = ends
    part = Exited("g", first_code, f"from {first or 'here'}", node=first)
    assert bool(kills(driver.do(part))) is bool(first_code), "the other one is told to end"
    assert (job.command.exit_code, job.state) == (None, JobState.QUEUED)
    with pytest.raises(IllegalTransitionError):
        driver.do(part)
    driver.do(Exited("g", last_code, "later", node=last))
    assert (job.command.exit_code, job.state.ended, job.processes_gone) == (code, True, True)
    if first_code:
        assert job.command.said == part.said


def test_a_command_ends_only_where_it_was_started() -> None:
    driver = gang(Quiet())
    driver.do(PortFound("g", 0, 4242))
    with pytest.raises(IllegalTransitionError):
        driver.do(Exited("g", 0, node="c"))
