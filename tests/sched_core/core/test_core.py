"""The core on its own: events in, commands out, invariants after each."""

from __future__ import annotations

import pytest

from gpuslice import wire
from gpuslice.errors import IllegalTransitionError, UsageError
from gpuslice.sched_core.jobs.command import Purpose
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Cancelled,
    Command,
    Exited,
    Held,
    Kill,
    Launch,
    Notice,
    RankGone,
    Released,
    Reported,
    Tell,
    WakeAt,
)
from gpuslice.sched_core.lifecycle.rank_orders import NEVER
from gpuslice.types import MAX_COUNT

from ..driver import PROGRAM, Driver, picture, refused, suspended, told


def test_a_job_holds_still_until_its_first_lease() -> None:
    driver = Driver()
    assert driver.submit("a") == [Launch("a", PROGRAM)]
    assert driver.state("a") is JobState.QUEUED
    assert told(driver.hello("a"), wire.Resume) == [("a", 0, wire.Resume(epoch=1, device="null:0"))]
    assert driver.state("a") is JobState.STARTING
    driver.resumed("a")
    assert driver.state("a") is JobState.RUNNING


def test_the_device_changes_hands_only_when_the_holder_has_parked() -> None:
    driver = Driver()
    driver.running_pair()
    commands = driver.wake()
    assert told(commands, wire.Suspend) == [("a", 0, wire.Suspend(epoch=1, stop_at=11))]
    assert told(commands, wire.Resume) == []
    assert told(driver.parked("a", 11), wire.Resume) == [("b", 0, wire.Resume(epoch=1, device="null:0"))]
    driver.resumed("b")
    driver.progress("b", 1)
    driver.wake()
    commands = driver.parked("b", 3)
    assert told(commands, wire.Resume) == [("a", 0, wire.Resume(epoch=2, device="null:0"))]


def test_reports_of_an_older_epoch_are_dropped() -> None:
    driver = Driver()
    driver.running_pair()
    driver.wake()
    driver.parked("a", 11)
    driver.resumed("b")
    driver.progress("b", 1)
    driver.wake()
    driver.parked("b", 2)
    before = picture(driver.core)
    assert driver.say("a", suspended(1, 99)) == []
    assert driver.say("a", wire.Progress(epoch=1, boundary=99, step=99)) == []
    assert picture(driver.core) == before


def test_an_overshot_raises_the_boundary_by_more_each_time() -> None:
    driver = Driver()
    driver.running_pair()
    driver.wake()
    raised = []
    for boundary in (15, 20, 30):
        ((_, _, message),) = told(driver.overshot("a", boundary), wire.Suspend)
        raised.append(message.stop_at - boundary)
    assert raised == [1, 3, 7]
    assert driver.overshot("a", 20) == [], "an answer to an earlier request"


def test_ranks_that_parked_too_early_go_on_to_where_the_others_stop() -> None:
    driver = Driver(3)
    driver.running_gang()
    assert {message.stop_at for _, _, message in told(driver.wake(), wire.Suspend)} == {11}
    driver.parked("g", 11, 0)
    commands = driver.overshot("g", 11, 1)
    assert told(commands, wire.Resume) == [("g", 0, wire.Resume(epoch=1, device="null:0"))]
    assert {(rank, message.stop_at) for _, rank, message in told(commands, wire.Suspend)} == {
        (0, 12),
        (1, 12),
        (2, 12),
    }
    driver.resumed("g", 0)
    driver.parked("g", 12, 0)
    driver.parked("g", 12, 1)
    assert driver.state("g") is JobState.SUSPENDING, "rank 2 is still running"
    # Rank 2 parks at the old boundary before it hears of the new one.
    assert told(driver.parked("g", 11, 2), wire.Resume) == [("g", 2, wire.Resume(epoch=1, device="null:2"))]
    driver.resumed("g", 2)
    assert {name for name, _, _ in told(driver.parked("g", 12, 2), wire.Resume)} == {"h"}
    assert driver.state("g") is JobState.SUSPENDED


def test_a_rank_that_cannot_go_on_to_the_others_is_sent_again() -> None:
    driver = Driver(3)
    driver.running_gang()
    driver.wake()
    driver.parked("g", 11, 0)
    driver.overshot("g", 11, 1)
    commands = driver.say("g", refused(1, 11, running=False), 0)
    driver.parked("g", 12, 1)
    driver.parked("g", 12, 2)
    assert driver.state("g") is JobState.SUSPENDING, "rank 0 is parked, but at another boundary"
    (wake,) = [command for command in commands if isinstance(command, WakeAt)]
    assert wake.when_s is not None
    assert {rank for _, rank, _ in told(driver.wake(wake.when_s - driver.now_s), wire.Resume)} == {0}
    driver.resumed("g", 0)
    driver.parked("g", 12, 0)
    assert driver.state("g") is JobState.SUSPENDED


def test_a_rank_that_dies_fails_the_gang_and_the_device_waits_for_the_others() -> None:
    driver = Driver(3)
    driver.running_gang()
    commands = driver.do(RankGone("g", 1))
    assert commands[0] == Kill("g", "rank 1 died", 0, Purpose.FAIL)
    assert driver.state("g") is JobState.FAILED
    for rank in (0, 2):
        assert told(driver.do(RankGone("g", rank)), wire.Resume) == []
    assert len(told(driver.do(Exited("g", -15)), wire.Resume)) == 3


@pytest.mark.parametrize(("code", "state"), [(0, JobState.SUCCEEDED), (3, JobState.FAILED)])
def test_the_exit_code_decides(code: int, state: JobState) -> None:
    driver = Driver()
    driver.running_pair()
    driver.say("a", wire.Bye(epoch=1, boundary=12, step=12))
    driver.do(RankGone("a", 0))
    commands = driver.do(Exited("a", code))
    assert driver.state("a") is state
    assert len(told(commands, wire.Resume)) == 1, "b has the device now"


def test_a_script_that_ends_while_told_to_stop_has_succeeded() -> None:
    driver = Driver()
    driver.running_pair()
    driver.wake()
    driver.say("a", wire.Bye(epoch=1, boundary=10, step=10))
    driver.do(RankGone("a", 0))
    driver.do(Exited("a", 0))
    assert (driver.state("a"), driver.state("b")) == (JobState.SUCCEEDED, JobState.STARTING)


def test_cancelling_kills_and_frees_the_device_for_the_next() -> None:
    driver = Driver()
    driver.running_pair()
    commands = driver.do(Cancelled("a", "enough"))
    assert commands[0] == Kill("a", "enough", 0, Purpose.CANCEL)
    ((job, _, order),) = told(commands, wire.Suspend)
    assert (job, order.stop_at, order.ending) == ("a", NEVER, True), "it may run on until it has saved"
    driver.do(RankGone("a", 0))
    assert len(told(driver.do(Exited("a", -15)), wire.Resume)) == 1
    with pytest.raises(IllegalTransitionError, match="cancelled"):
        driver.do(Cancelled("a", "again"))


def test_a_refused_suspend_is_tried_again_later() -> None:
    driver = Driver()
    driver.running_pair()
    driver.wake()
    commands = driver.say("a", refused(1, 11, running=True))
    assert driver.state("a") is JobState.RUNNING
    (wake,) = [command for command in commands if isinstance(command, WakeAt)]
    assert wake.when_s is not None
    assert told(driver.wake(wake.when_s - driver.now_s), wire.Suspend) != []
    driver.parked("a", 12)
    assert driver.state("b") is JobState.STARTING


def test_a_refused_suspend_brings_the_parked_ranks_back() -> None:
    driver = Driver(3)
    driver.running_gang()
    driver.wake()
    driver.parked("g", 11, 0)
    assert {rank for _, rank, _ in told(driver.say("g", refused(1, 11, running=True), 1), wire.Resume)} == {0}
    driver.resumed("g", 0)
    assert driver.state("g") is JobState.RUNNING
    # Rank 2 had parked before it heard that the suspend was called off.
    assert {rank for _, rank, _ in told(driver.parked("g", 11, 2), wire.Resume)} == {2}
    driver.resumed("g", 2)
    assert driver.state("g") is JobState.RUNNING


def test_a_refused_resume_is_tried_again_and_fails_in_the_end() -> None:
    driver = Driver()
    driver.submit("a")
    driver.hello("a")
    tries = 0
    while driver.state("a") is JobState.STARTING:
        driver.say("a", refused(1, 0, running=False))
        tries += 1
        driver.wake(100.0)
    assert (tries, driver.state("a")) == (5, JobState.FAILED)
    assert "no room" in driver.core.jobs["a"].verdict.reason


def test_a_job_that_could_never_run_is_refused() -> None:
    driver = Driver(2)
    with pytest.raises(UsageError, match="3 devices of 2"):
        driver.submit("a", 3)
    assert not driver.core.jobs


def test_an_illegal_event_tells_the_story_and_changes_nothing() -> None:
    driver = Driver()
    driver.running_pair()
    before = picture(driver.core)
    with pytest.raises(
        IllegalTransitionError, match=r"job a is in the state 'running'.*all ranks on the device -> running"
    ):
        driver.parked("a", 11)
    with pytest.raises(IllegalTransitionError, match="no job 'z'"):
        driver.do(Exited("z", 0))
    assert picture(driver.core) == before


def test_a_held_job_gives_its_device_up_and_stays_away_until_it_is_released() -> None:
    driver = Driver()
    driver.running_pair()
    assert told(driver.do(Held("a")), wire.Suspend) == [("a", 0, wire.Suspend(epoch=1, stop_at=11))]
    assert [name for name, _, _ in told(driver.parked("a", 11), wire.Resume)] == ["b"]
    driver.resumed("b")
    driver.do(Exited("b", 0))
    driver.do(RankGone("b", 0))
    assert told(driver.wake(), wire.Resume) == [], "the device is free, but a is held"
    assert told(driver.do(Released("a")), wire.Resume) == [("a", 0, wire.Resume(epoch=2, device="null:0"))]


def test_a_job_held_before_its_first_lease_gets_none() -> None:
    driver = Driver()
    driver.submit("a")
    driver.do(Held("a"))
    assert told(driver.hello("a"), wire.Resume) == []
    assert len(told(driver.do(Released("a")), wire.Resume)) == 1


def test_only_a_held_job_is_released_and_only_one_that_is_not_is_held() -> None:
    driver = Driver()
    driver.running_pair()
    with pytest.raises(IllegalTransitionError, match="resume by its owner"):
        driver.do(Released("a"))
    driver.do(Held("a"))
    with pytest.raises(IllegalTransitionError, match="suspend by its owner"):
        driver.do(Held("a"))


def again(driver: Driver, job: str, *, epoch: int, boundary: int, parked: bool) -> list[Command]:
    """What the core makes of a rank that greets a scheduler that was started again."""
    return driver.say(
        job,
        wire.Hello(
            version=1, job=job, rank=0, world_size=1, pid=1, epoch=epoch, boundary=boundary, parked=parked
        ),
    )


def test_a_lost_lease_is_given_again() -> None:
    driver = Driver()
    driver.submit("a")
    driver.hello("a")
    lease = [("a", 0, wire.Resume(epoch=1, device="null:0"))]
    assert told(again(driver, "a", epoch=0, boundary=0, parked=True), wire.Resume) == lease


def test_a_lost_resumed_is_made_up_for() -> None:
    driver = Driver()
    driver.submit("a")
    driver.hello("a")
    again(driver, "a", epoch=1, boundary=7, parked=False)
    assert driver.state("a") is JobState.RUNNING
    assert driver.core.jobs["a"].ranks[0].boundary == 7


def test_a_lost_suspend_is_told_again_and_a_suspended_said_again_changes_nothing() -> None:
    driver = Driver()
    driver.running_pair()
    driver.wake()
    order = [("a", 0, wire.Suspend(epoch=1, stop_at=11))]
    assert told(again(driver, "a", epoch=1, boundary=10, parked=False), wire.Suspend) == order
    driver.parked("a", 11)
    before = picture(driver.core)
    again(driver, "a", epoch=1, boundary=11, parked=True)
    driver.say("a", suspended(1, 11))
    assert picture(driver.core) == before


def test_another_process_cannot_take_the_place_of_a_rank() -> None:
    driver = Driver()
    driver.running_pair()
    with pytest.raises(IllegalTransitionError, match="Hello of rank 0"):
        driver.say("a", wire.Hello(version=1, job="a", rank=0, world_size=1, pid=2, epoch=1, parked=False))


def test_a_process_takes_over_a_rank_from_the_one_that_started_it() -> None:
    driver = Driver()
    for job in "ab":
        driver.submit(job)
        driver.hello(job)
    driver.resumed("a")

    def claim(pid: int, replaces: int) -> list[Command]:
        hello = wire.Hello(version=1, job="a", rank=0, world_size=1, pid=pid, replaces=replaces, boundary=4)
        return driver.say("a", hello)

    commands = claim(2, replaces=1)
    assert Tell("a", 0, wire.Replaced(), pid=1) in commands
    assert [message.epoch for _, _, message in told(commands, wire.Resume)] == [2]
    driver.resumed("a")
    assert driver.state("a") is JobState.RUNNING
    assert (driver.core.jobs["a"].ranks[0].pid, driver.core.jobs["a"].ranks[0].boundary) == (2, 4)
    driver.progress("a", 10)
    assert Tell("a", 0, wire.Queued(behind=2), pid=3) in claim(3, replaces=2)
    driver.wake()
    driver.parked("a", 11)
    assert driver.state("b") is not JobState.QUEUED


def test_a_rank_that_went_unseen_leaves_the_verdict_to_the_exit_code() -> None:
    driver = Driver(3)
    driver.running_gang()
    driver.do(RankGone("g", 1, unseen=True))
    assert driver.state("g") is JobState.RUNNING
    driver.do(Exited("g", 0))
    assert driver.state("g") is JobState.SUCCEEDED


def test_a_job_whose_process_is_gone_is_given_no_device_before_its_exit_is_known() -> None:
    driver = Driver()
    for job in ("a", "b"):
        driver.submit(job)
        driver.hello(job)
    driver.do(RankGone("b", 0))
    driver.do(Cancelled("a", "enough"))
    driver.do(Exited("a", -15))
    driver.do(RankGone("a", 0))
    assert driver.state("b") is JobState.QUEUED
    driver.do(Exited("b", 1))
    assert driver.state("b") is JobState.FAILED


def test_what_is_said_again_and_again_comes_to_no_number_that_is_none() -> None:
    """A distance or a pause that is doubled each time is a float's infinity after 1,024 times."""
    driver = Driver(1)
    driver.running_pair()
    for _ in range(1100):
        driver.core.handle(Reported("a", 0, refused(1, 10, running=True)), driver.now_s)
    assert driver.core.jobs["a"].refusals.suspend.until_s <= driver.now_s + 60.0
    driver = Driver(1)
    driver.running_pair()
    driver.wake()
    gang = driver.core.jobs["a"]
    for _ in range(1100):
        report = wire.Overshot(epoch=1, boundary=min(gang.asked.stop_at, MAX_COUNT))
        for command in driver.core.handle(Reported("a", 0, report), driver.now_s):
            if isinstance(command, Tell):
                wire.decode_to_agent(wire.encode(command.message))
    assert 2**30 < gang.asked.stop_at < 2**62


def test_a_gang_keeps_its_devices_while_a_rank_that_has_said_bye_still_exists() -> None:
    driver = Driver(2)
    driver.running_gang(2)
    driver.wake()
    assert driver.state("g") is JobState.SUSPENDING
    driver.say("g", wire.Bye(epoch=1, boundary=12, step=12), 0)
    assert told(driver.parked("g", driver.core.jobs["g"].asked.stop_at, 1), wire.Resume) == []
    assert driver.state("g") is JobState.SUSPENDING
    assert {job for job, _, _ in told(driver.do(RankGone("g", 0)), wire.Resume)} == {"h"}
    assert driver.state("g") is JobState.SUSPENDED


def test_where_a_gang_goes_on_is_told_once_all_ranks_have_said_it() -> None:
    driver = Driver(2)
    driver.running_gang(2)

    def goes_on(rank: int, boundary: int) -> list[Command]:
        epoch = driver.core.jobs["g"].epoch
        message = wire.Progress(epoch=epoch, boundary=boundary, step=boundary, went_on_from=7)
        return driver.say("g", message, rank)

    assert goes_on(0, 11) == []
    assert goes_on(1, 11) == [Notice("went_on", "g", {"attempt": 1, "boundary": 7})]
    assert goes_on(0, 12) == goes_on(1, 12) == []
