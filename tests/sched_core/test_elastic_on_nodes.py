"""An elastic job has all of its devices on one node, whatever the policy; parked it can go to another."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import WAIT_FOR_NODE_S, JobSpec
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Command, Exited, Moved, NodeLost, RankGone, Submitted
from gpuslice.sched_core.policies.registry import POLICIES
from gpuslice.sched_core.policy import Migrate, Plan, Start, Suspend
from gpuslice.types import DeviceName

from .driver import PROGRAM, Driver, Scripted, notices, suspended
from .relocating import Quiet, brings, brought, idle, kills, launches, plan
from .test_lost_nodes import WRAPPED, World, world

#: Policies that give devices, and what makes them do so within the time that a job of the tests takes.
GIVING: list[tuple[str, dict[str, Any]]] = [
    ("gandiva", {"look_s": 20.0}),
    ("optimus", {"interval_s": 40.0}),
    ("slaq", {"interval_s": 40.0}),
    ("themis", {"lease_s": 40.0}),
]
#: The others change no size either, and their jobs are placed by the same code.
EVERY_DAY = [("las", {}), ("las", {"pack": True}), ("2das", {"defragment": True}), *GIVING]
NODES = ("", "b")


def arrive(here: World, draw: random.Random, count: int = 14, **more: Any) -> None:
    """So many jobs come in the course of time, every other one elastic."""
    first = len(here.core.jobs)
    for number in range(first, first + count):
        demand = draw.choice((1, 1, 2)) if number % 2 == 0 else 1 + number % 4 // 2
        here.start(number, demand, **({"most_devices": 3, **more} if number % 2 else {}))
        here.go(draw.randint(0, 4))


@pytest.mark.filterwarnings("ignore:HiGHS")
@pytest.mark.parametrize(
    ("name", "options", "relaunch"),
    [
        *(
            pytest.param(
                name, options, False, marks=() if (name, options) in EVERY_DAY else pytest.mark.repeats
            )
            for name, options in (*((name, {}) for name in POLICIES), *WRAPPED, *GIVING)
        ),
        *((name, options, True) for name, options in GIVING),  # no other policy changes a size
    ],
    ids=lambda value: str(value) or "-",
)
def test_no_policy_gives_it_devices_of_two_nodes(
    name: str, options: Mapping[str, Any], relaunch: bool
) -> None:
    """``Core.check`` looks at every lease, and ``World`` at what is said of the policy."""
    here = world(name, options, 3)
    arrive(here, random.Random(1), relaunch=relaunch)
    assert set(here.finish()) == {JobState.SUCCEEDED}
    assert all(job.failures == 0 for job in here.core.jobs.values())


@pytest.mark.parametrize(("seed", "relaunch"), [(0, False), (1, True)])
@pytest.mark.parametrize(("name", "options"), GIVING)
def test_it_goes_on_elsewhere_when_its_node_is_lost(
    name: str, options: Mapping[str, Any], seed: int, relaunch: bool
) -> None:
    here, draw = world(name, options, 3), random.Random(seed)
    arrive(here, draw, relaunch=relaunch)
    here.lose("c")
    arrive(here, draw, 4)
    assert set(here.finish()) == {JobState.SUCCEEDED}


def until(here: World, widths: list[int]) -> None:
    """Let time pass until jobs have so many devices each."""
    seen: list[list[int]] = []
    while widths not in seen:
        here.tick()
        seen.append(sorted(len(job.lease) for job in here.core.jobs.values()))
        assert len(seen) < 40, seen


@pytest.mark.parametrize("relaunch", [False, True])
@pytest.mark.parametrize(("name", "options"), GIVING)
def test_it_grows_and_makes_room_again(name: str, options: Mapping[str, Any], relaunch: bool) -> None:
    here = world(name, options)
    here.start(0, 1, most_devices=2, relaunch=relaunch)
    until(here, [2])
    for number in range(1, 6):
        here.start(number, 1)
    until(here, [1] * 6)
    assert set(here.finish()) == {JobState.SUCCEEDED}


@pytest.mark.parametrize(("name", "options"), GIVING[1:])
def test_several_grow_into_what_their_nodes_have_left(name: str, options: Mapping[str, Any]) -> None:
    here = world(name, options)
    for number in range(3):
        here.start(number, 1, most_devices=2)
    until(here, [2, 2, 2])
    here.start(3, 1)
    until(here, [1, 1, 2, 2])


def test_it_may_have_no_more_devices_than_the_largest_node() -> None:
    spec = JobSpec(id="e", submit_s=0.0, most_devices=3)
    driver = Driver(2, Scripted(), NODES)
    with pytest.raises(UsageError, match="up to 3 devices, all on one node; the largest has 2"):
        driver.do(Submitted(spec, PROGRAM))
    driver.do(Submitted(msgspec.structs.replace(spec, most_devices=2), PROGRAM))


class Two(Driver):
    """Two nodes of two devices, and an elastic job with one or two that is on device 0."""

    def __init__(self, *, relaunch: bool = False, trained: bool = True) -> None:
        self.policy = Scripted()
        super().__init__(2, self.policy, NODES)
        self.policy.next = lambda view: Plan()
        spec = JobSpec(id="e", submit_s=0.0, most_devices=2, relaunch=relaunch, max_restarts=3)
        self.started = launches(self.do(Submitted(spec, PROGRAM)))
        self.policy.next = lambda view: Plan()
        self.hello("e")
        self.plan(Start("e", (0,)))
        self.resumed("e")
        self.policy.next = lambda view: Plan()
        if trained:
            self.progress("e", 10)

    @property
    def job(self) -> Gang:
        return self.core.jobs["e"]

    def plan(self, *decisions: Start | Suspend | Migrate) -> list[Command]:
        self.policy.next = lambda view: Plan(list(decisions))
        self.core.state.plan_due = True
        return self.wake()

    def park(self, *, restartable: bool = True, bound: str = "") -> list[Command]:
        """Its ranks park; of those whose number may change, only the first has a state that counts."""
        commands: list[Command] = []
        for rank in self.job.present(RankPhase.ON):
            report = suspended(self.job.epoch, self.job.asked.stop_at)
            more = {"restartable": restartable and not rank.number, "bound": bound}
            self.policy.next = lambda view: Plan()
            commands += self.say("e", msgspec.structs.replace(report, **more), rank.number)
        return commands

    def end(self) -> list[Command]:
        """All of its processes end."""
        commands: list[Command] = []
        for event in (*(RankGone("e", rank.number) for rank in self.job.there()), Exited("e", -9)):
            self.policy.next = lambda view: Plan()
            commands += self.do(event)
        return commands

    def sit(self, name: str) -> None:
        """Another job waits."""
        self.policy.next = lambda view: Plan()
        self.submit(name)
        self.policy.next = lambda view: Plan()
        self.hello(name)


def test_all_of_its_processes_are_on_one_node() -> None:
    assert [launch.nodes for launch in Two().started] == [("", "")]


def test_a_plan_for_devices_of_two_nodes_is_refused() -> None:
    driver = Two()
    (notice,) = notices(driver.plan(Migrate("e", (0, 2))))
    assert (notice.what, driver.job.placement) == ("policy_failed", (0,))
    assert "elastic job e is given devices of several nodes" in str(notice.details["error"])


def test_parked_it_goes_to_another_node_with_the_snapshot_of_rank_0() -> None:
    driver = Two()
    driver.plan(Migrate("e", (0, 1)))
    driver.park()
    for rank in range(2):
        driver.resumed("e", rank)
    driver.plan(Migrate("e", (2, 3)))
    assert kills(driver.park())
    (bring,) = brings(driver.end())
    assert (bring.sources, bring.targets) == (("",), ("b",))
    assert brought(driver, "e").nodes == ("b", "b")
    driver.hello("e")
    for rank in range(2):
        driver.resumed("e", rank)
        driver.progress("e", 12, rank)
    assert (driver.state("e"), driver.job.lease, driver.job.failures) == (JobState.RUNNING, (2, 3), 0)


def test_without_such_a_snapshot_it_stays() -> None:
    driver = Two()
    driver.plan(Migrate("e", (2, 3)))
    assert not kills(driver.park(restartable=False))
    assert (driver.job.within, driver.job.lease) == ((0,), (0, 1)), "as many here"


def test_a_command_that_is_started_anew_stays_where_it_has_trained() -> None:
    driver = Two(relaunch=True)
    assert driver.job.within == (0,)
    driver.plan(Migrate("e", (2, 3)))
    assert driver.job.placement == (0, 1), "as many here"
    driver.park()
    (launch,) = launches(driver.end())
    assert launch.nodes == ("", "")
    driver.hello("e")
    for rank in range(2):
        driver.resumed("e", rank)
        driver.progress("e", 12, rank)
    driver.sit("x")
    driver.plan(Migrate("e", (2,)), Start("x", (0,)))
    assert not driver.job.running or driver.job.placement == (1,)


def test_a_state_that_is_bound_to_its_device_keeps_it_on_its_node() -> None:
    driver = Two()
    driver.plan(Migrate("e", (2, 3)))
    driver.park(bound="it has a stream of its own")
    assert (driver.job.within, driver.job.lease) == ((0,), ())
    driver.plan(Start("e", (0, 1)))
    assert driver.job.lease == (0, 1)


def test_a_command_that_trains_just_when_it_is_to_leave_stays() -> None:
    driver = Two(relaunch=True, trained=False)
    driver.plan(Migrate("e", (2, 3)))
    assert driver.job.placement == (2, 3)
    driver.park()
    assert driver.job.placement == (0, 1)
    assert launches(driver.end())[0].nodes == ("", "")


def test_after_a_failure_such_a_command_begins_with_its_least_number_where_it_trained() -> None:
    driver = Two(relaunch=True)
    driver.plan(Migrate("e", (0, 1)))
    driver.park()
    driver.end()
    driver.hello("e")
    for rank in range(2):
        driver.resumed("e", rank)
        driver.progress("e", 12, rank)
    driver.end()
    driver.policy.next = lambda view: Plan()
    (launch,) = launches(driver.wake(60.0))
    assert (launch.nodes, len(driver.job.ranks)) == (("",), 1)


def test_its_processes_are_on_one_node_also_if_none_is_large_enough_now() -> None:
    devices = [DeviceName("null", 0), *(DeviceName("null", slot, node="b") for slot in range(2))]
    core = Core([*devices, DeviceName("null", 0, node="c")], Scripted())
    core.handle(NodeLost("b"), 0.0)
    commands = core.handle(Submitted(JobSpec(id="e", submit_s=0.0, most_devices=2), PROGRAM), 0.0)
    assert [launch.nodes for launch in launches(commands)] == [("", "")]


def test_before_it_has_trained_such_a_command_can_go_elsewhere() -> None:
    policy = Scripted()
    driver = Driver(2, policy, NODES)
    policy.next = lambda view: Plan()
    driver.do(Submitted(JobSpec(id="e", submit_s=0.0, most_devices=2, relaunch=True), PROGRAM))
    for name in ("x", "y"):
        policy.next = lambda view: Plan()
        driver.submit(name)
        policy.next = lambda view: Plan()
        driver.hello(name)
    policy.next = lambda view: Plan([Start("y", (0,)), Start("e", (2, 3))])
    driver.hello("e")
    policy.next = lambda view: Plan()
    driver.do(RankGone("e", 0))
    policy.next = lambda view: Plan()
    (launch,) = launches(driver.do(Exited("e", 0)))
    assert launch.nodes == ("b", "b")
    assert driver.core.jobs["e"].within == (0, 1)


def test_it_may_get_another_number_of_devices_while_it_goes_elsewhere() -> None:
    policy = Quiet()
    driver = Driver(2, policy, NODES)
    driver.do(Submitted(JobSpec(id="e", submit_s=0.0, most_devices=2, relaunch=True), PROGRAM))
    driver.hello("e")
    for name in "wxyz":
        idle(driver, name)
    here = [name for name in "wxyz" if driver.core.jobs[name].nodes == (0,)]
    plan(driver, policy, *(Start(name, (device,)) for device, name in enumerate(here)))
    (kill,) = kills(plan(driver, policy, Start("e", (2,))))
    assert kill.reason == "it goes to another node"
    job = driver.core.jobs["e"]
    plan(driver, policy, Migrate("e", (2, 3)))
    assert job.state is JobState.RELAUNCHING
    for rank in job.there():
        driver.do(RankGone("e", rank.number))
    (launch,) = launches(driver.do(Exited("e", -9)))
    assert launch.nodes == ("b", "b")
    driver.hello("e")
    for rank in range(2):
        driver.resumed("e", rank)
    assert (job.state, job.lease) == (JobState.RUNNING, (2, 3))


@pytest.mark.parametrize("relaunch", [False, True])
def test_after_its_node_is_lost_it_begins_elsewhere(*, relaunch: bool) -> None:
    """A command that is started anew has checkpoints of its own: nobody asks the lost node for its state."""
    driver = Driver(2, Scripted(), NODES)
    for name in ("x", "e"):
        spec = JobSpec(id=name, submit_s=0.0, most_devices=2, max_restarts=1, relaunch=relaunch)
        driver.do(Submitted(spec, PROGRAM))
    job = driver.core.jobs["e"]
    assert set(job.nodes) == {1}
    driver.hello("e")
    driver.resumed("e")
    driver.progress("e", 5)
    assert job.lease in ((2,), (3,))
    driver.do(NodeLost("b"))
    assert kills(driver.wake(WAIT_FOR_NODE_S))
    for rank in job.ranks:
        driver.do(RankGone("e", rank.number))
    commands = driver.do(Exited("e", -9))
    assert [bring.sources for bring in brings(commands)] == ([] if relaunch else [("",)])
    launch = launches(commands)[0] if relaunch else brought(driver, "e")
    assert set(launch.nodes) == {""}


def test_it_keeps_what_is_left_if_another_job_is_moved_to_one_of_its_devices() -> None:
    driver = Two()
    driver.plan(Migrate("e", (0, 1)))
    driver.park()
    driver.sit("x")
    driver.plan(Start("x", (2,)))
    driver.policy.next = lambda view: Plan()
    driver.do(Moved("x", ("null:1",)))
    assert (driver.job.placement, driver.core.jobs["x"].placement) == ((0,), (1,))


def test_its_trial_is_on_one_node() -> None:
    """The two devices that nobody has are on different nodes."""
    policy = Scripted()
    driver = Driver(3, policy, NODES)
    for name, device in zip("abcd", (1, 2, 4, 5), strict=True):
        driver.do(Submitted(JobSpec(id=name, submit_s=0.0), PROGRAM))
        policy.next = lambda view, name=name, device=device: Plan([Start(name, (device,))])  # type: ignore[misc]
        driver.hello(name)
    driver.do(Submitted(JobSpec(id="e", submit_s=0.0, devices=2, most_devices=3, trial_batches=5), PROGRAM))
    driver.hello("e")
    assert len({device // 3 for device in driver.core.jobs["e"].borrowed}) == 1
