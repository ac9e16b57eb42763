"""Trials: the first mini-batches ahead of every queue, on devices that are given back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuslice import wire
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Cancelled, Exited, Held, Moved, RankGone, Released, Submitted
from gpuslice.sched_core.policies.chronus.policy import Chronus
from gpuslice.sched_core.policies.fifo import Fifo
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Policy, Start

from ..driver import PROGRAM, Driver, notices, told
from ..relocating import NODES, Quiet, begun, plan
from .test_deadlines import end, obey

BATCHES = 5


def submit(driver: Driver, job: str, *, trial: bool = True, ranks: int = 1, restarts: int = 0) -> Gang:
    spec = JobSpec(
        id=job,
        submit_s=driver.now_s,
        devices=ranks,
        trial_batches=BATCHES if trial else 0,
        max_restarts=restarts,
    )
    driver.do(Submitted(spec, PROGRAM))
    driver.hello(job)
    return driver.core.jobs[job]


def crowded(policy: Policy | None = None, devices: int = 1) -> Driver:
    """Every device has a job that runs, and one more waits."""
    driver = Driver(devices, policy or Fifo())
    for number in range(devices + 1):
        submit(driver, f"old{number}", trial=False)
        obey_ranks(driver)
    driver.now_s += 1.0
    return driver


def obey_ranks(driver: Driver) -> None:
    """As ``obey``, for gangs too."""
    for job in driver.core.jobs.values():
        for rank in job.ranks:
            if job.state is JobState.SUSPENDING:
                driver.parked(job.id, job.asked.stop_at, rank.number)
    for job in driver.core.jobs.values():
        for rank in job.ranks:
            if job.state in (JobState.STARTING, JobState.RESUMING):
                driver.resumed(job.id, rank.number)


def test_it_is_tried_at_once_and_the_holder_comes_back() -> None:
    driver = crowded()
    old = driver.core.jobs["old0"]
    new = submit(driver, "new")
    orders = told(driver.do(Cancelled("old1", "")), wire.Suspend)
    assert [job for job, _, order in orders if not order.ending] == []
    assert (old.state, new.state) == (JobState.SUSPENDING, JobState.QUEUED)
    driver.parked("old0", old.asked.stop_at)
    assert (old.state, new.state, new.lease) == (JobState.SUSPENDED, JobState.STARTING, (0,))
    driver.resumed("new")
    driver.now_s += 1.0
    assert notices(driver.progress("new", 1)) != []
    driver.progress("new", BATCHES)
    assert new.borrowed, "the fifth mini-batch has only begun"
    driver.now_s += 2.0
    (passed,) = notices(driver.progress("new", BATCHES + 1))
    assert (passed.what, passed.details) == ("trial_passed", {"batches": BATCHES})
    assert new.service_at(driver.now_s) == 2.0, "its set-up is none"
    driver.parked("new", new.asked.stop_at)
    assert (old.state, new.state) == (JobState.RESUMING, JobState.SUSPENDED)
    driver.resumed("old0")
    served_s = old.service_at(driver.now_s)
    driver.now_s += 1.0
    assert old.service_at(driver.now_s) == served_s + 1.0
    assert new.service_at(driver.now_s) == 2.0
    end(driver, "old0")
    assert new.state is JobState.RESUMING, "now it is its turn"


def test_it_does_not_wait_for_the_policy_but_the_policy_is_told_of_nothing() -> None:
    seen: list[set[str]] = []

    class Watching(Fifo):
        def plan(self, view):  # type: ignore[no-untyped-def]
            seen.append({job.id for job in view.running()})
            return super().plan(view)

    driver = crowded(Watching())
    seen.clear()
    submit(driver, "new")
    driver.wake()
    assert seen
    assert all(running == {"old0"} for running in seen)


def test_where_a_device_is_free_nobody_is_disturbed_and_who_may_stay_stays() -> None:
    driver = Driver(2, Fifo())
    old = submit(driver, "old", trial=False)
    obey(driver)
    new = submit(driver, "new")
    assert (old.state, new.lease) == (JobState.RUNNING, (1,))
    driver.resumed("new")
    assert told(driver.progress("new", BATCHES + 1), wire.Suspend) == []
    assert (new.state, new.epoch) == (JobState.RUNNING, 1)
    driver.now_s += 1.0
    assert new.service_at(driver.now_s) == 1.0


def test_a_gang_disturbs_as_few_as_it_can() -> None:
    driver = Driver(4, Fifo())
    for name, ranks in (("single", 1), ("pair", 2), ("last", 1)):
        submit(driver, name, trial=False, ranks=ranks)
        obey_ranks(driver)
    new = submit(driver, "new", ranks=2)
    lent = {job.id for job in driver.core.jobs.values() if job.lent}
    assert (lent, new.borrowed) == ({"pair"}, (1, 2))
    end(driver, "last")
    other = submit(driver, "other")
    assert other.borrowed == (3,), "the free one"


def test_a_guaranteed_job_is_disturbed_last() -> None:
    driver = Driver(2, Fifo())
    first = submit(driver, "first", trial=False)
    submit(driver, "second", trial=False)
    obey(driver)
    first.guaranteed = True
    assert submit(driver, "new").borrowed == (1,)


@pytest.mark.parametrize("before", ["hello", "lease", "boundary"])
def test_whoever_fails_in_the_trial_has_failed_for_good(before: str) -> None:
    driver = crowded()
    if before == "hello":
        driver.do(Submitted(JobSpec(id="new", submit_s=0.0, trial_batches=BATCHES, max_restarts=3), PROGRAM))
    else:
        submit(driver, "new", restarts=3)
    if before == "boundary":
        obey(driver)
    said = notices(driver.do(Exited("new", -9)))
    for rank in driver.core.jobs["new"].there():
        said += notices(driver.do(RankGone("new", rank.number)))
    (failed,) = said
    assert (failed.what, failed.details["class"]) == ("trial_failed", "infrastructure")
    assert failed.details["restart_in_s"] is None
    assert driver.state("new") is JobState.FAILED
    obey(driver)
    assert driver.state("old0") is JobState.RUNNING


def test_who_has_passed_is_retried_without_another_trial() -> None:
    driver = Driver(1, Fifo())
    new = submit(driver, "new", restarts=1)
    driver.resumed("new")
    driver.progress("new", BATCHES + 1)
    end(driver, "new", -9)
    driver.wake(5.0)
    driver.hello("new")
    assert new.state is JobState.STARTING
    assert not new.borrowed


@pytest.mark.parametrize("ends", [lambda d: d.do(Cancelled("new", "")), lambda d: d.do(Held("new"))])
def test_a_trial_that_is_given_up_gives_the_device_back(ends: Callable[[Driver], object]) -> None:
    driver = crowded()
    new = submit(driver, "new")
    obey(driver)
    assert new.state is JobState.RUNNING
    ends(driver)
    obey(driver)
    obey(driver)
    assert driver.state("old0") is JobState.RUNNING
    assert not driver.core.jobs["old0"].lent


def test_before_the_holder_has_stopped_it_simply_runs_on() -> None:
    driver = crowded()
    old = driver.core.jobs["old0"]
    submit(driver, "new")
    before_s = old.service_at(driver.now_s)
    driver.do(Cancelled("new", ""))
    driver.now_s += 1.0
    driver.parked("old0", old.asked.stop_at)
    driver.resumed("old0")
    driver.now_s += 2.0
    assert old.service_at(driver.now_s) == before_s + 2.0


def test_a_held_job_is_tried_when_it_is_released() -> None:
    driver = crowded()
    new = submit(driver, "new")
    driver.do(Held("new"))
    obey(driver)
    driver.do(Released("new"))
    obey(driver)
    assert (new.state, new.borrowed) == (JobState.RUNNING, (0,))


def test_a_trial_that_reaches_no_boundary_ends_all_the_same() -> None:
    driver = crowded()
    new = submit(driver, "new")
    obey(driver)
    (late,) = [notice for notice in notices(driver.wake(60.0)) if notice.what == "late"]
    assert (late.job, late.details["order"]) == ("new", "trial")
    assert new.tried
    driver.parked("new", new.asked.stop_at)
    obey(driver)
    assert driver.state("old0") is JobState.RUNNING


def test_a_holder_that_does_not_stop_is_left_alone_and_another_asked() -> None:
    driver = crowded(devices=2)
    new = submit(driver, "new")
    stuck = next(job for job in driver.core.jobs.values() if job.lent)
    driver.wake(60.0)
    other = next(job for job in driver.core.jobs.values() if job.lent)
    assert {stuck.id, other.id} == {"old0", "old1"}
    assert stuck.state is JobState.RESUMING or stuck.state is JobState.RUNNING
    driver.parked(other.id, other.asked.stop_at)
    assert new.state is JobState.STARTING


def test_several_are_tried_one_after_the_other_on_one_device() -> None:
    driver = crowded()
    names = ["a", "b"]
    for name in names:
        submit(driver, name)
    obey(driver)
    assert [driver.core.jobs[name].borrowed for name in names] == [(0,), ()]
    driver.progress("a", BATCHES + 1)
    obey(driver)
    assert [driver.core.jobs[name].borrowed for name in names] == [(), (0,)]
    driver.progress("b", BATCHES + 1)
    obey(driver)
    assert driver.state("old0") is JobState.RUNNING


def test_a_job_that_is_started_on_another_node_for_its_trial_is_tried_there() -> None:
    driver = Driver(1, Fifo(), NODES)
    submit(driver, "old", trial=False)  # on the first node, so the next job is started on the other one
    driver.do(Cancelled("old", "enough"))
    job = submit(driver, "new")
    driver.do(RankGone("old", 0))
    driver.do(Exited("old", -9))
    assert (job.borrowed, job.nodes, job.relocating) == ((0,), (1,), True)
    driver.do(RankGone("new", 0))
    driver.do(Exited("new", -9))
    assert job.nodes == (0,)
    driver.hello("new")
    assert (job.borrowed, job.state, job.lease) == ((0,), JobState.STARTING, (0,))


def test_a_trial_that_its_owner_has_broken_off_goes_on_where_it_was() -> None:
    driver = Driver(1, Fifo(), NODES)
    job = submit(driver, "new")
    driver.resumed("new")
    driver.progress("new", 1)
    driver.do(Held("new"))
    driver.parked("new", job.asked.stop_at)
    submit(driver, "old", trial=False)
    driver.do(Moved("old", ("null:0",)))  # so that a trial disturbs nobody on the other node
    driver.do(Released("new"))
    assert (job.borrowed, job.nodes) == ((0,), (0,))


def test_a_lender_that_cannot_leave_its_node_is_not_moved_from_it_meanwhile() -> None:
    policy = Quiet()
    driver = Driver(1, policy, NODES)
    begun(policy, driver, "old")
    submit(driver, "other", trial=False)
    plan(driver, policy, Start("other", (1,)))
    driver.resumed("other")
    job = submit(driver, "new")
    assert (job.borrowed, job.nodes) == ((0,), (0,))
    old = driver.core.jobs["old"]
    driver.parked("old", 11)
    assert old.lent
    driver.do(Moved("old", ("b/null:0",)))
    driver.parked("other", 11)
    driver.resumed("new")
    driver.progress("new", BATCHES + 1)
    assert not old.lent
    assert not old.running, "it waits for a device of its own node"


@pytest.mark.parametrize("policy", ["rr", "2das", "las", "srtf", "drf", "chronus"])
def test_a_job_whose_trial_has_all_its_steps_in_it_disturbs_no_policy(policy: str) -> None:
    driver = Driver(1, make_policy(policy, {}))
    spec = JobSpec(id="a", submit_s=driver.now_s, trial_batches=BATCHES, max_steps=BATCHES)
    driver.do(Submitted(spec, PROGRAM))
    driver.hello("a")
    driver.resumed("a")
    message = wire.Progress(epoch=1, boundary=BATCHES + 1, step=BATCHES)
    assert [notice.what for notice in notices(driver.say("a", message))] == ["began", "trial_passed"]
    obey(driver)
    assert driver.state("a") is JobState.SUCCEEDED


@pytest.mark.parametrize("policy", ["rr", "2das", "las", "gittins", "srtf", "gandiva"])
def test_every_policy_goes_on_as_if_nothing_had_been(policy: str) -> None:
    driver = crowded(make_policy(policy, {}))
    submit(driver, "new")
    for _ in range(40):
        driver.wake(30.0)
        obey(driver)
        for job in list(driver.core.jobs.values()):
            if job.state is JobState.RUNNING and job.ranks[0].boundary < 1000:
                driver.progress(job.id, job.ranks[0].boundary + 4)
                obey(driver)
    jobs = driver.core.jobs.values()
    assert driver.core.jobs["new"].tried
    assert not any(job.lent or job.borrowed for job in jobs)
    assert sum(job.state is JobState.RUNNING for job in jobs) >= 1
    assert all(driver.core.jobs[name].service_at(driver.now_s) > 0 for name in ("old0", "new"))


def test_what_chronus_guarantees_is_timed_in_the_trial_too() -> None:
    driver = Driver(1, Chronus(lease_s=4.0, best_effort_lease_s=2.0, horizon=20, solver="greedy"))
    spec = JobSpec(
        id="new",
        submit_s=driver.now_s,
        trial_batches=BATCHES,
        steps=100,
        deadlines=((100.0, 1.0),),
    )
    driver.do(Submitted(spec, PROGRAM))
    driver.hello("new")
    driver.resumed("new")
    for step in range(1, BATCHES + 3):
        driver.now_s += 0.5
        driver.progress("new", step)
    job = driver.core.jobs["new"]
    assert job.step_time.step_s == pytest.approx(0.5)
    assert job.guaranteed
