"""An elastic job in the core: all its ranks wait from the beginning; its lease says which of them train."""

from __future__ import annotations

import pytest

from gpuslice import wire
from gpuslice.errors import UsageError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Command, Exited, Moved, RankGone, Submitted
from gpuslice.sched_core.policies.gandiva.policy import Gandiva
from gpuslice.sched_core.policy import Migrate, Plan

from .driver import PROGRAM, Driver, Resized, Resizer, devices, notices, picture, told

JOB = "e"


def spec(least: int = 1, most: int = 3, **more: int) -> JobSpec:
    return JobSpec(id=JOB, submit_s=0.25, devices=least, least_devices=least, most_devices=most, **more)


class Elastic(Resized):
    """A driver with one elastic job, at boundary 10."""

    def __init__(self, **more: int) -> None:
        super().__init__(spec(**more))
        self.begun = self.hello(JOB)
        self.resumed(JOB)
        self.progress(JOB, 10)

    def resize(self, *onto: int) -> list[Command]:
        """Have the policy want it there; its ranks park, and those that are to train come."""
        members = len(self.job.members)
        stops = told(self.want(*onto), wire.Suspend)
        assert [rank for _, rank, _ in stops] == list(range(members))
        (stop_at,) = {stop.stop_at for _, _, stop in stops}
        return [command for rank in range(members) for command in self.parked(JOB, stop_at, rank)]

    def resized(self, *onto: int) -> None:
        self.resize(*onto)
        for rank in range(len(onto)):
            self.resumed(JOB, rank)


def phases(driver: Elastic) -> list[str]:
    return [rank.phase.value for rank in driver.job.ranks]


def test_it_begins_with_its_least_number_and_all_ranks_ready() -> None:
    driver = Elastic()
    assert [(rank, order.device, order.width) for _, rank, order in told(driver.begun, wire.Resume)] == [
        (0, "null:0", 1)
    ]
    assert phases(driver) == ["on", "parked", "parked"]
    assert driver.state(JOB) is JobState.RUNNING


def test_ranks_come_and_go_at_a_boundary() -> None:
    driver = Elastic()
    grown = driver.resize(0, 1, 2)
    epoch = driver.job.epoch
    assert [
        (rank, order.device, order.width, order.world) for _, rank, order in told(grown, wire.Resume)
    ] == [(0, "null:0", 3, epoch), (1, "null:1", 3, epoch), (2, "null:2", 3, epoch)]
    assert [(n.what, n.details) for n in notices(grown) if n.what == "resized"] == [
        ("resized", {"from": 1, "to": 3})
    ]
    assert driver.state(JOB) is JobState.RESUMING
    for rank in range(3):
        driver.resumed(JOB, rank)
    assert driver.state(JOB) is JobState.RUNNING
    driver.resized(3)
    assert phases(driver) == ["on", "parked", "parked"]
    assert driver.job.lease == (3,)


def test_a_lease_of_the_same_ranks_is_the_same_world() -> None:
    """Ranks that were only parked keep their process group; who was away meanwhile is told of another."""
    driver = Elastic()
    driver.resized(0, 1)
    first = driver.job.world
    same = told(driver.resize(1, 2), wire.Resume)
    assert {order.world for _, _, order in same} == {first}
    for rank in range(2):
        driver.resumed(JOB, rank)
    driver.resized(0)
    back = told(driver.resize(0, 1), wire.Resume)
    assert {order.world for _, _, order in back} == {driver.job.epoch}


def test_a_newcomer_that_is_behind_stops_with_the_others() -> None:
    """It has passed no boundary, because it is still being set up when the gang is to stop again."""
    driver = Elastic()
    driver.resized(0, 1)
    at = driver.job.ranks[0].boundary
    driver.resize(0, 1, 2)
    for rank in range(3):
        driver.resumed(JOB, rank)
    assert [rank.boundary for rank in driver.job.ranks] == [at + 1, at + 1, 0]
    driver.resized(0)
    assert driver.job.lease == (0,)


def test_where_it_goes_on_is_told_once_rank_0_has_said_it() -> None:
    """The others have no snapshot: they get its state."""
    driver = Elastic()
    driver.resized(0, 1)
    epoch = driver.job.epoch
    message = wire.Progress(epoch=epoch, boundary=12, step=12, went_on_from=7)
    told_of = [note for note in notices(driver.say(JOB, message, 0)) if note.what == "went_on"]
    assert [note.details for note in told_of] == [{"attempt": 1, "boundary": 7}]
    other = wire.Progress(epoch=epoch, boundary=12, step=12)
    assert not [note for note in notices(driver.say(JOB, other, 1)) if note.what == "went_on"]


@pytest.mark.parametrize("when", ["training", "parking", "coming"])
def test_ranks_that_greet_a_new_scheduler_go_on_in_the_midst_of_a_change(when: str) -> None:
    """Whoever waits, in or out of the world, is where it was; lost orders are told again."""
    driver = Elastic()
    driver.resized(0, 1)
    old = driver.job.epoch
    if when == "parking":
        driver.want(0, 1, 2)
    elif when == "coming":
        driver.resize(0, 1, 2)
    at = [rank.boundary for rank in driver.job.ranks]
    told_again: list[tuple[int, str]] = []
    for rank, epoch, parked in [(0, old, when == "coming"), (1, old, when == "coming"), (2, 0, True)]:
        hello = wire.Hello(
            version=1, job=JOB, rank=rank, world_size=3, pid=1, boundary=at[rank], epoch=epoch, parked=parked
        )
        orders = driver.say(JOB, hello, rank)
        told_again += [(to, type(order).__name__) for _, to, order in told(orders, wire.Message)]
    assert (
        told_again
        == {
            "training": [],
            "parking": [(0, "Suspend"), (1, "Suspend")],
            "coming": [(0, "Resume"), (1, "Resume"), (2, "Resume")],
        }[when]
    )


def test_ranks_that_wait_are_dismissed_when_the_others_have_ended() -> None:
    driver = Elastic()
    driver.resized(0, 1)
    epoch = driver.job.epoch
    bye = wire.Bye(epoch=epoch, boundary=30, step=30)
    assert told(driver.say(JOB, bye, 0), wire.Dismiss) == []
    assert [rank for _, rank, _ in told(driver.say(JOB, bye, 1), wire.Dismiss)] == [2]
    # The order was lost with its connection: it is told again.
    hello = wire.Hello(version=1, job=JOB, rank=2, world_size=3, pid=1, epoch=0)
    assert [rank for _, rank, _ in told(driver.say(JOB, hello, 2), wire.Dismiss)] == [2]
    for rank in range(3):
        driver.do(RankGone(JOB, rank))
    driver.do(Exited(JOB, 0))
    assert driver.state(JOB) is JobState.SUCCEEDED


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("when", ["training", "parking", "coming"])
def test_a_rank_that_dies_takes_all_down_and_the_next_attempt_begins_small(rank: int, when: str) -> None:
    driver = Elastic(max_restarts=1)
    driver.resized(0, 1)
    if when == "parking":
        driver.want(0, 1, 2)
    elif when == "coming":
        driver.resize(0, 1, 2)
    driver.do(RankGone(JOB, rank))
    assert driver.state(JOB) is JobState.FAILED
    for other in {0, 1, 2} - {rank}:
        driver.do(RankGone(JOB, other))
    driver.do(Exited(JOB, 1))
    assert driver.state(JOB) is JobState.QUEUED
    driver.wake(5.0)
    orders = told(driver.hello(JOB), wire.Resume)
    assert [(number, order.width, order.world) for _, number, order in orders] == [(0, 1, driver.job.epoch)]


def test_the_journal_makes_the_same_of_it() -> None:
    driver = Elastic(max_restarts=1)
    driver.resized(0, 1)
    driver.resize(0)
    replayed = Resizer()
    again = Driver(4, replayed)
    wants = iter([(0, 1), (0,)])
    for event, now in driver.journal:
        again.now_s = now
        if type(event).__name__ == "Woken":
            onto = next(wants)
            replayed.next = lambda view, onto=onto: Plan([Migrate(JOB, onto)])  # type: ignore[misc]
            again.core.state.plan_due = True
        again.do(event)
    assert picture(again.core) == picture(driver.core)


def test_gandiva_grows_it_into_idle_devices_and_shrinks_it_for_others() -> None:
    driver = Driver(3, Gandiva(quantum_s=1.0, look_s=5.0))
    driver.do(Submitted(spec(), PROGRAM))
    driver.hello(JOB)
    driver.resumed(JOB)
    driver.progress(JOB, 10)
    stop = told(driver.wake(10.0), wire.Suspend)[0][2].stop_at
    driver.parked(JOB, stop)
    for rank in range(3):
        driver.resumed(JOB, rank)
        driver.progress(JOB, stop + 5, rank)
    assert driver.core.jobs[JOB].lease == (0, 1, 2)
    driver.submit("other", 2)
    stops = told(driver.hello("other"), wire.Suspend)
    assert [rank for _, rank, _ in stops] == [0, 1, 2]
    for rank in range(3):
        driver.parked(JOB, stops[0][2].stop_at, rank)
    driver.resumed(JOB)
    assert len(driver.core.jobs[JOB].lease) == 1
    assert len(driver.core.jobs["other"].lease) == 2
    assert [rank.phase for rank in driver.core.jobs[JOB].ranks] == [
        RankPhase.ON,
        RankPhase.PARKED,
        RankPhase.PARKED,
    ]


def test_what_is_not_possible_is_refused() -> None:
    with pytest.raises(UsageError, match="asks for 5 devices of 4"):
        Driver(4).do(Submitted(spec(1, 5), PROGRAM))
    with pytest.raises(UsageError, match="may have 1 to 3 devices, which its policy chooses"):
        Elastic().do(Moved(JOB, (str(devices(2)[1]),)))
