"""What a rank says after its Bye, until its process is gone, is no error."""

from __future__ import annotations

import pytest

from gpuslice import wire
from gpuslice.errors import IllegalTransitionError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Exited, Held, RankGone, Released, Submitted

from ..driver import PROGRAM, Driver


def leaving() -> Driver:
    """A running job whose only rank has said Bye."""
    driver = Driver()
    driver.submit("a")
    driver.hello("a")
    driver.resumed("a")
    driver.progress("a", 10)
    driver.say("a", wire.Bye(epoch=1, boundary=10, step=10))
    return driver


def test_an_order_to_stop_may_meet_a_rank_that_has_ended() -> None:
    driver = leaving()
    assert driver.say("a", wire.Overshot(epoch=1, boundary=10)) == []


def test_a_rank_that_ends_may_greet_another_scheduler() -> None:
    driver = leaving()
    hello = wire.Hello(version=4, job="a", rank=0, world_size=1, pid=1, boundary=10, epoch=1, parked=False)
    assert driver.say("a", hello) == []
    with pytest.raises(IllegalTransitionError):  # another process that runs already
        driver.say("a", wire.Hello(version=4, job="a", rank=0, world_size=1, pid=2, epoch=1, parked=False))
    driver.do(RankGone("a", 0, pid=1))
    driver.do(Exited("a", 0))
    assert driver.state("a") is JobState.SUCCEEDED


def test_a_trial_that_was_broken_off_goes_on_with_the_next_process() -> None:
    driver = Driver()
    driver.do(Submitted(JobSpec(id="a", submit_s=0.25, trial_batches=5), PROGRAM))
    driver.hello("a")
    driver.resumed("a")
    driver.progress("a", 3)
    driver.do(Held("a"))
    driver.say("a", wire.Bye(epoch=1, boundary=4, step=4))
    driver.do(RankGone("a", 0, pid=1))
    driver.say("a", wire.Hello(version=4, job="a", rank=0, world_size=1, pid=2))
    assert driver.state("a") is JobState.SUSPENDED
    driver.do(Released("a"))
    assert driver.state("a") is JobState.RESUMING
