"""Processes are started where few are, and go to another node when their job's devices are there."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from gpuslice import wire
from gpuslice.errors import UsageError
from gpuslice.sched_core.job import WAIT_FOR_NODE_S, JobSpec
from gpuslice.sched_core.jobs.command import Purpose
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Bring,
    Cancelled,
    Command,
    Exited,
    Held,
    Kill,
    Moved,
    NodeFound,
    NodeLost,
    RankGone,
    Released,
    Submitted,
)
from gpuslice.sched_core.options import find
from gpuslice.sched_core.policies.registry import POLICIES, make_policy, policy_names
from gpuslice.sched_core.policy import Migrate, Places, Plan, Policy, Start, View

from .driver import PROGRAM, Driver, Scripted, notices, suspended, told
from .relocating import (
    NODES,
    Quiet,
    begun,
    brings,
    brought,
    idle,
    kills,
    launches,
    on_its_way,
    one_begun,
    one_parked,
    park,
    plan,
)


def test_processes_are_started_where_few_are() -> None:
    driver = Driver(1, Scripted(), NODES)
    started = [launches(driver.submit(job))[0] for job in "abcd"]
    assert [launch.nodes for launch in started] == [("",), ("b",), ("",), ("b",)]


def test_a_rank_is_told_its_device_as_its_node_calls_it() -> None:
    driver = Driver(1, Scripted(), NODES)
    driver.submit("a")
    driver.hello("a")
    driver.submit("b")
    assert [message.device for _, _, message in told(driver.hello("b"), wire.Resume)] == ["null:0"]
    assert [str(driver.core.devices[device]) for device in driver.core.jobs["b"].lease] == ["b/null:0"]


def test_a_job_is_given_a_device_of_its_own_node_if_that_is_free() -> None:
    policy = Quiet()
    driver = Driver(1, policy, NODES)
    driver.submit("a")
    policy.next = lambda view: Plan([Start("a", (1,))])
    driver.hello("a")
    assert driver.core.jobs["a"].lease == (0,)


class Placing:
    """Wants every job on devices of node b, as many as it asks for; places jobs by itself."""

    name = "placing"
    needs_durations = False

    def plan(self, view: View) -> Plan:
        free = view.free().on_node[1]
        return Plan([Start(job.id, tuple(free[: job.demand])) for job in list(view.waiting())[:1] if free])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_starts_on_the_node_that_a_policy_that_places_jobs_has_planned(ranks: int) -> None:
    driver = Driver(2, Placing(), NODES)
    assert launches(driver.submit("a", ranks))[0].nodes == ("",) * ranks
    (kill,) = kills(driver.hello("a"))
    for rank in range(ranks):
        driver.do(RankGone("a", rank))
    (launch,) = launches(driver.do(Exited("a", -9)))
    assert (kill.job, launch.nodes) == ("a", ("b",) * ranks)
    driver.hello("a")
    assert driver.core.state.nodes.of(driver.core.jobs["a"].lease) == (1,) * ranks


class Noting:
    """A policy that keeps the devices on which it starts each job."""

    def __init__(self, inner: Policy) -> None:
        self.inner, self.name, self.needs_durations = inner, inner.name, inner.needs_durations
        self.placement = inner.placement if isinstance(inner, Places) else None
        self.starts: dict[str, tuple[int, ...]] = {}

    def plan(self, view: View) -> Plan:
        plan = self.inner.plan(view)
        for decision in plan.decisions:
            if isinstance(decision, Start):
                self.starts.setdefault(decision.job, decision.devices)
        return plan


@pytest.mark.parametrize("placement", ["", "consolidated"])
@pytest.mark.parametrize("name", policy_names())
def test_under_each_policy_jobs_start_where_it_wants_them(name: str, placement: str) -> None:
    """On two nodes of two devices; where which nodes does not matter, on as many as planned or fewer."""
    if placement and "placement" not in inspect.signature(find("policy", POLICIES, name)).parameters:
        pytest.skip("it places jobs by itself")
    policy = Noting(make_policy(name, {"placement": placement} if placement else {}))
    driver = Driver(2, policy, NODES)
    for job, ranks in (("a", 1), ("b", 2), ("c", 1), ("d", 2)):
        spec = JobSpec(id=job, submit_s=driver.now_s, devices=ranks, expected_s=100.0, steps=100)
        driver.do(Submitted(spec, PROGRAM))
    for _ in range(4):
        for job, gang in driver.core.jobs.items():
            settle(driver, job, gang)
        driver.wake(0.01)
    nodes = driver.core.state.nodes.of
    started = [gang for gang in driver.core.jobs.values() if gang.lease]
    assert started
    for gang in started:
        wanted, found = nodes(policy.starts[gang.id]), nodes(gang.lease)
        if policy.placement is None:
            assert found == wanted, gang.id
        assert len({*found}) <= len({*wanted}), gang.id


def settle(driver: Driver, job: str, gang: Gang) -> None:
    """Let the processes of ``job`` come, or end if they are to be started elsewhere."""
    if gang.relocating:
        for rank in range(len(gang.ranks)):
            driver.do(RankGone(job, rank))
        driver.do(Exited(job, -9))
    if gang.command.launched and not gang.ready:
        driver.hello(job)


def test_two_that_are_planned_crosswise_are_exchanged() -> None:
    policy = Quiet()
    driver = Driver(1, policy, NODES)
    for job in "ab":
        idle(driver, job)
    plan(driver, policy, Start("a", (1,)), Start("b", (0,)))
    assert [driver.core.jobs[job].lease for job in "ab"] == [(0,), (1,)]


def test_a_job_without_state_is_started_anew_where_its_device_is() -> None:
    policy, driver = one_begun()
    for job in "bc":  # on node b, and here
        idle(driver, job)
    commands = plan(driver, policy, Start("c", (1,)))
    assert kills(commands) == [Kill("c", "it goes to another node", 0, Purpose.RELOCATE)]
    assert driver.state("c") is JobState.QUEUED
    driver.do(Exited("c", -9))
    (launch,) = launches(driver.do(RankGone("c", 0)))
    assert (launch.nodes, launch.attempt) == (("b",), 1)
    assert [message.device for _, _, message in told(driver.hello("c"), wire.Resume)] == ["null:0"]
    assert driver.core.jobs["c"].failures == 0, "that was no failure"
    driver.resumed("c")
    assert driver.state("c") is JobState.RUNNING


def test_a_parked_job_goes_on_elsewhere_from_its_snapshot() -> None:
    policy, driver = one_parked(restartable=True)
    plan(driver, policy, Start("a", (1,)))
    driver.do(RankGone("a", 0))
    commands = driver.do(Exited("a", -9))
    assert brings(commands) == [Bring("a", 1, ("",), ("b",))]
    (notice,) = notices(commands)
    assert (notice.what, notice.details) == ("relocated", {"from": "here", "to": "b", "bytes": 8})
    launch = brought(driver)
    assert (launch.nodes, launch.attempt) == (("b",), 1)
    driver.hello("a")
    driver.resumed("a")
    driver.progress("a", 12)
    assert driver.state("a") is JobState.RUNNING
    assert driver.core.jobs["a"].state_nodes == (1,)


def test_how_long_it_stood_still_on_its_way_is_told_and_expected_of_the_next() -> None:
    policy, driver = one_parked(restartable=True)
    other = driver.core.jobs["x"]
    here, there = (driver.core.state.switch_costs.expected_s(other, (device,)) for device in (0, 1))
    assert here is not None
    assert there is None, "nobody has gone there"
    plan(driver, policy, Start("a", (1,)))
    former_s = driver.job_history.accounts["a"].blackout_s
    left_s = driver.core.jobs["a"].relocation.left_s
    assert left_s is not None
    driver.now_s = left_s + 1.0
    driver.do(RankGone("a", 0))
    driver.do(Exited("a", -9))
    driver.now_s += 4.0
    driver.hello("a")
    driver.resumed("a")
    driver.now_s += 2.0
    (told_of,) = [note for note in notices(driver.progress("a", 12)) if note.what == "arrived"]
    assert told_of.details == {"blackout_s": 7.0, "ending_s": 1.0, "bringing_s": 4.0, "setup_s": 2.0}
    assert driver.job_history.accounts["a"].blackout_s == former_s + 7.0
    assert driver.core.state.switch_costs.expected_s(other, (1,)) == 7.0
    assert not [note for note in notices(driver.progress("a", 13)) if note.what == "arrived"]


def test_the_time_for_which_its_owner_holds_a_job_on_its_way_is_not_the_way_s() -> None:
    policy, driver = one_parked(restartable=True)
    plan(driver, policy, Start("a", (1,)))
    driver.do(Held("a"))
    driver.do(RankGone("a", 0))
    assert launches(driver.do(Exited("a", -9)))[0].nodes == ("",)  # it has no devices now
    driver.hello("a")
    driver.now_s += 3600.0
    driver.do(Released("a"))
    plan(driver, policy, Start("a", (1,)))
    again_s = driver.now_s
    driver.do(RankGone("a", 0))
    driver.do(Exited("a", -9))
    driver.hello("a")
    driver.resumed("a")
    driver.now_s += 2.0
    (arrived,) = [note for note in notices(driver.progress("a", 12)) if note.what == "arrived"]
    assert arrived.details["blackout_s"] == driver.now_s - again_s


def test_its_owner_moves_a_job_to_another_node() -> None:
    _, driver = one_begun()
    driver.do(Moved("a", ("b/null:0",)))
    report = suspended(driver.core.jobs["a"].epoch, 11)
    commands = driver.say("a", msgspec.structs.replace(report, restartable=True))
    assert kills(commands)
    assert on_its_way(driver).targets == ("b",)


def test_a_job_that_only_its_own_process_can_go_on_with_waits_for_its_node() -> None:
    policy, driver = one_parked(restartable=False)
    commands = plan(driver, policy, Start("a", (1,)))
    assert not kills(commands)
    assert not driver.core.jobs["a"].running
    park(policy, driver, "x", restartable=False)
    plan(driver, policy, Start("a", (1,)))
    assert driver.core.jobs["a"].lease == (0,)


def test_its_owner_cannot_move_such_a_job_for_ever() -> None:
    """What was asked for is impossible, so it comes back to where it was."""
    _, driver = one_begun()
    driver.do(Moved("a", ("b/null:0",)))
    commands = driver.parked("a", 11)
    assert not kills(commands)
    assert [message.device for _, _, message in told(commands, wire.Resume)] == ["null:0"]
    assert driver.core.jobs["a"].lease == (0,)


def parked_on_its_way_to_b(driver: Driver, boundary: int, *, restartable: bool, later: bool) -> list[Command]:
    """Job a is told to leave for node b, and parks."""
    report = suspended(driver.core.jobs["a"].epoch, boundary)
    return driver.say("a", msgspec.structs.replace(report, restartable=restartable, restartable_later=later))


def test_a_job_that_parks_where_it_cannot_be_moved_goes_from_a_later_boundary() -> None:
    """As one does that parks after the last batch of an epoch. It trains on for longer after every try."""
    _, driver = one_begun()
    job = driver.core.jobs["a"]
    orders = driver.do(Moved("a", ("b/null:0",)))
    boundary = 10
    for trains in (1, 3, 7):
        assert [order.stop_at for _, _, order in told(orders, wire.Suspend)] == [boundary + 1]
        boundary += 1
        commands = parked_on_its_way_to_b(driver, boundary, restartable=False, later=True)
        assert not kills(commands)
        (note,) = [note for note in notices(commands) if note.what == "not_moved"]
        assert note.details == {"to": "b/null:0", "again": True}
        assert job.lease == (0,)
        driver.resumed("a")
        assert not told(driver.progress("a", boundary + trains - 1), wire.Suspend)
        assert job.requested_devices == (1,), "people are shown where it goes"
        boundary += trains
        orders = driver.progress("a", boundary)
    commands = parked_on_its_way_to_b(driver, boundary + 1, restartable=True, later=False)
    assert kills(commands)
    assert job.requested_devices == ()
    assert on_its_way(driver).targets == ("b",)


def test_its_owner_is_told_that_a_job_cannot_be_moved_at_all() -> None:
    _, driver = one_begun()
    driver.do(Moved("a", ("b/null:0",)))
    commands = parked_on_its_way_to_b(driver, 11, restartable=False, later=False)
    (note,) = [note for note in notices(commands) if note.what == "not_moved"]
    assert note.details == {"to": "b/null:0", "again": False}
    driver.resumed("a")
    assert not told(driver.progress("a", 1000), wire.Suspend)
    assert driver.core.jobs["a"].requested_devices == ()


def test_a_job_that_ends_on_its_way_is_given_no_device_again() -> None:
    _, driver = one_begun()
    driver.do(Moved("a", ("b/null:0",)))
    driver.do(Cancelled("a", "enough"))
    driver.do(RankGone("a", 0))
    driver.do(Exited("a", -9))
    assert [driver.core.state.holders(device) for device in range(2)] == [[], []]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_job_that_cannot_follow_an_exchange_to_another_node_waits_for_its_own(order: str) -> None:
    policy, driver = one_begun()
    idle(driver, "b")
    plan(driver, policy, Start("b", (1,)))
    driver.resumed("b")
    driver.progress("b", 10)
    driver.do(Moved("a", ("b/null:0",)))
    for name in order:
        report = suspended(driver.core.jobs[name].epoch, 11)
        driver.say(name, msgspec.structs.replace(report, restartable=name == "a"))
    a, b = (driver.core.jobs[name] for name in "ab")
    assert (a.wanted, a.relocating, b.wanted) == ((1,), True, ())
    driver.do(Cancelled("a", "enough"))
    driver.do(RankGone("a", 0))
    driver.do(Exited("a", -9))
    plan(driver, policy, Start("b", (0,)))
    assert b.lease == (1,)


def test_a_move_that_is_to_be_tried_again_is_forgotten_for_another_one() -> None:
    _, driver = one_begun()
    driver.do(Moved("a", ("b/null:0",)))
    parked_on_its_way_to_b(driver, 11, restartable=False, later=True)
    driver.do(Moved("a", ("null:0",)))
    driver.resumed("a")
    assert not told(driver.progress("a", 1000), wire.Suspend)
    assert driver.core.jobs["a"].requested_devices == ()


def test_nor_is_a_job_moved_to_a_node_that_was_lost_meanwhile() -> None:
    _, driver = one_begun()
    driver.do(Moved("a", ("b/null:0",)))
    parked_on_its_way_to_b(driver, 11, restartable=False, later=True)
    driver.resumed("a")
    driver.do(NodeLost("b"))
    assert not told(driver.progress("a", 1000), wire.Suspend)
    assert driver.core.jobs["a"].requested_devices == ()


def test_the_ranks_of_a_gang_follow_each_other_on_each_node() -> None:
    policy = Quiet()
    driver = Driver(2, policy, NODES)
    (launch,) = launches(driver.submit("g", 3))
    assert launch.nodes == ("", "", "b")
    policy.next = lambda view: Plan([Start("g", (3, 1, 0))])
    driver.hello("g")
    assert driver.core.jobs["g"].lease == (1, 0, 3)


def test_a_gang_without_state_is_started_anew_where_its_devices_are() -> None:
    policy = Quiet()
    driver = Driver(2, policy, NODES)
    idle(driver, "g", 2)  # both here
    assert launches(idle(driver, "y", 2))[0].nodes == ("b", "b")
    begun(policy, driver, "x")
    plan(driver, policy, Start("g", (3, 1)))
    driver.do(RankGone("g", 1))
    driver.do(RankGone("g", 0))
    (launch,) = launches(driver.do(Exited("g", -9)))
    assert launch.nodes == ("", "b")
    driver.hello("g")
    for rank in range(2):
        driver.resumed("g", rank)
    assert driver.state("g") is JobState.RUNNING


def test_a_job_that_is_cancelled_on_its_way_is_not_started_again() -> None:
    policy, driver = one_parked(restartable=True)
    plan(driver, policy, Start("a", (1,)))
    driver.do(Cancelled("a", "enough"))
    driver.do(RankGone("a", 0))
    assert not launches(driver.do(Exited("a", -9)))
    assert driver.state("a") is JobState.CANCELLED


def test_devices_of_a_lost_node_are_given_to_nobody_until_it_is_found() -> None:
    driver = Driver(1, Scripted(), NODES)
    driver.do(NodeLost("b"))
    for job in "ab":
        driver.submit(job)
        driver.hello(job)
    assert [driver.core.jobs[job].nodes for job in "ab"] == [(0,), (0,)]
    assert [driver.core.jobs[job].running for job in "ab"] == [True, False]
    driver.do(NodeFound("b"))
    assert driver.core.jobs["b"].placement == (1,)


def test_a_node_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(UsageError, match="no node 'c'"):
        Driver(1, Scripted(), NODES).do(NodeLost("c"))


def test_a_job_of_a_lost_node_is_started_elsewhere_when_it_has_waited_long_enough() -> None:
    driver = Driver(1, Scripted(), NODES)
    begun_on = driver.submit("x")
    assert launches(begun_on)[0].nodes == ("",)
    spec = JobSpec(id="a", submit_s=driver.now_s, devices=1, max_restarts=1)
    driver.do(Submitted(spec, PROGRAM))
    driver.hello("x")
    driver.hello("a")
    driver.resumed("a")
    driver.progress("a", 5)
    driver.do(NodeLost("b"))
    driver.resumed("x")
    driver.progress("x", 3)
    driver.do(Exited("x", 0))
    driver.do(RankGone("x", 0))
    assert not kills(driver.wake(WAIT_FOR_NODE_S - 1.0))
    assert [kill.job for kill in kills(driver.wake(1.0))] == ["a"]
    driver.do(RankGone("a", 0))
    assert [bring.sources for bring in brings(driver.do(Exited("a", -9)))] == [("",)]
    assert brought(driver).nodes == ("",)
    assert driver.core.jobs["a"].failures == 0


def test_a_gang_that_was_started_elsewhere_waits_for_all_of_its_ranks() -> None:
    """Its devices are its own all the while; before, the first rank trained alone when it came early."""
    policy = Quiet()
    driver = Driver(2, policy, NODES)
    idle(driver, "g", 2)
    idle(driver, "y", 2)
    begun(policy, driver, "x")
    plan(driver, policy, Start("g", (1, 3)))
    driver.do(RankGone("g", 1))
    driver.do(RankGone("g", 0))
    assert launches(driver.do(Exited("g", -9)))[0].nodes == ("", "b")
    first = driver.say("g", wire.Hello(version=1, job="g", rank=0, world_size=2, pid=1), 0)
    assert not told(first, wire.Resume)
    second = driver.say("g", wire.Hello(version=1, job="g", rank=1, world_size=2, pid=2), 1)
    assert [rank for _, rank, _ in told(second, wire.Resume)] == [0, 1]


def test_a_job_whose_processes_are_being_ended_is_let_on_no_device() -> None:
    """The policy has thought better of it, and gives it a device of the node that it is about to leave."""
    policy, driver = one_parked(restartable=True)
    assert kills(plan(driver, policy, Start("a", (1,))))
    park(policy, driver, "x", restartable=False)
    assert not told(plan(driver, policy, Migrate("a", (0,))), wire.Resume)
    driver.do(RankGone("a", 0))
    assert launches(driver.do(Exited("a", -9)))[0].nodes == ("",)
    assert [message.device for _, _, message in told(driver.hello("a"), wire.Resume)] == ["null:0"]


def placed(placement: str, skew: float = 0.1) -> tuple[Driver, list[Command]]:
    """Jobs x and y train on a device of each of two nodes, and gang g has come; what starting that took."""
    policy = make_policy("fifo", {"placement": placement} if placement else {})
    driver = Driver(2, policy, NODES)
    for job in "xy":
        driver.submit(job)
        driver.hello(job)
        driver.resumed(job)
        driver.progress(job, 10)
    assert [driver.core.jobs[job].nodes for job in "xy"] == [(0,), (1,)]
    started = driver.do(Submitted(JobSpec(id="g", submit_s=driver.now_s, devices=2, skew=skew), PROGRAM))
    driver.hello("g")
    return driver, started


@pytest.mark.parametrize("placement", ["", "count", "skew"])
def test_a_gang_that_may_lie_anywhere_has_what_is_free(placement: str) -> None:
    driver, _ = placed(placement)
    assert driver.core.jobs["g"].placement == (1, 3)


@pytest.mark.parametrize(("placement", "skew"), [("consolidated", 0.1), ("skew", 0.5)])
def test_a_gang_that_is_to_be_on_one_node_waits_for_it(placement: str, skew: float) -> None:
    driver, started = placed(placement, skew)
    assert launches(started)[0].nodes == ("", "")
    assert not driver.core.jobs["g"].running
    driver.do(RankGone("x", 0))
    driver.do(Exited("x", 0))
    assert driver.core.jobs["g"].lease == (0, 1)


def test_a_gang_that_is_spread_is_started_and_has_devices_on_both_nodes() -> None:
    driver, started = placed("spread")
    assert launches(started)[0].nodes == ("", "b")
    assert driver.core.jobs["g"].lease == (1, 3)


@pytest.mark.parametrize(("placement", "nodes"), [("count", (0, 0)), ("spread", (0, 1))])
def test_where_a_placement_was_chosen_its_own_node_counts_only_if_it_is_such_a_place(
    placement: str, nodes: tuple[int, int]
) -> None:
    policy = Quiet(placement)
    driver = Driver(2, policy, NODES)
    idle(driver, "g", 2)
    gang = driver.core.jobs["g"]
    gang.nodes = (0, 0)
    plan(driver, policy, Start("g", (0, 2)))
    assert driver.core.state.nodes.of(gang.placement) == nodes
