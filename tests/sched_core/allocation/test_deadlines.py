"""Deadlines of live jobs: missed ones under any policy, guaranteed ones under Chronus, by measured steps."""

from __future__ import annotations

import pytest

from gpuslice import wire
from gpuslice.errors import UsageError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import IN_TRANSIT, JobState
from gpuslice.sched_core.jobs.step_time import StepTime
from gpuslice.sched_core.lifecycle.events import (
    Cancelled,
    Exited,
    Held,
    RankGone,
    Released,
    Submitted,
    Weighted,
)
from gpuslice.sched_core.policies.chronus.leases import Claim, overbooked
from gpuslice.sched_core.policies.chronus.policy import Chronus
from gpuslice.sched_core.policies.fifo import Fifo
from gpuslice.sched_core.policy import Plan, PolicyError, View

from ..driver import PROGRAM, Driver, notices

STEP_S = 0.1


def chronus() -> Driver:
    return Driver(1, Chronus(lease_s=4.0, best_effort_lease_s=2.0, horizon=20, solver="greedy"))


def submit(driver: Driver, job: str, *, steps: int = 0, deadline_s: float = 0.0, only: bool = False) -> Gang:
    deadlines = ((deadline_s, 1.0),) if deadline_s else ()
    spec = JobSpec(id=job, submit_s=driver.now_s, steps=steps, deadlines=deadlines, guaranteed=only)
    driver.do(Submitted(spec, PROGRAM))
    driver.hello(job)
    obey(driver)
    return driver.core.jobs[job]


def obey(driver: Driver) -> None:
    """Let every rank do what it was told, and end what was killed."""
    while moving := [job for job in driver.core.jobs.values() if job.state in IN_TRANSIT]:
        for job in moving:
            if job.state is JobState.SUSPENDING:
                driver.parked(job.id, job.asked.stop_at)
            else:
                driver.resumed(job.id)
    for job in driver.core.jobs.values():
        if job.state.ended and not job.processes_gone:
            end(driver, job.id, -15)


def end(driver: Driver, job: str, code: int = 0) -> None:
    driver.do(Exited(job, code))
    for rank in driver.core.jobs[job].there():
        driver.do(RankGone(job, rank.number))


def train(driver: Driver, seconds: float, step_s: float = STEP_S, **slow: float) -> None:
    """Time goes by; whoever runs makes a step every so often and reports twice a second."""
    for _ in range(round(seconds / 0.5)):
        driver.wake(0.5)
        obey(driver)
        for job in driver.core.jobs.values():
            if job.state is JobState.RUNNING:
                rank = job.ranks[0]
                step = rank.step + round(0.5 / slow.get(job.id, step_s))
                driver.say(
                    job.id, wire.Progress(epoch=job.epoch, boundary=max(step, rank.boundary), step=step)
                )
                obey(driver)


def told_of(driver: Driver, what: str) -> list[str]:
    """Jobs of which the core said ``what``; the driver hands notices back as the shell does."""
    return [job for job, said in SAID[id(driver)] if said == what]


SAID: dict[int, list[tuple[str, str]]] = {}


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    SAID.clear()
    do = Driver.do

    def listen(self: Driver, event: object) -> object:
        commands = do(self, event)  # type: ignore[arg-type]
        SAID.setdefault(id(self), []).extend((note.job, note.what) for note in notices(commands))
        return commands

    monkeypatch.setattr(Driver, "do", listen)


def test_a_job_that_can_be_guaranteed_is_once_its_steps_were_timed() -> None:
    driver = chronus()
    job = submit(driver, "a", steps=100, deadline_s=60.0)
    assert job.state is JobState.RUNNING
    assert job.guaranteed is None
    train(driver, 2.0)
    assert job.guaranteed is True
    assert told_of(driver, "guaranteed") == ["a"]


def test_one_that_asked_for_more_than_there_is_time_for_is_refused() -> None:
    driver = chronus()
    job = submit(driver, "a", steps=1000, deadline_s=60.0, only=True)
    train(driver, 2.0)
    assert (job.state, job.guaranteed) == (JobState.CANCELLED, False)
    assert job.verdict.reason.startswith("its deadline cannot be guaranteed: it needs about 99 s within 59 s")
    assert told_of(driver, "stopped") == ["a"]


def test_without_insisting_it_runs_on_without_a_guarantee_and_misses() -> None:
    driver = chronus()
    job = submit(driver, "a", steps=1000, deadline_s=60.0)
    train(driver, 59.0)
    assert (job.state, job.guaranteed, job.deadline_missed) == (JobState.RUNNING, False, False)
    train(driver, 2.0)
    assert (job.state, job.deadline_missed) == (JobState.RUNNING, True)
    assert told_of(driver, "deadline_missed") == ["a"]


def test_the_guarantee_is_kept_against_whoever_comes() -> None:
    driver = chronus()
    first = submit(driver, "first", steps=100, deadline_s=22.0)
    train(driver, 2.0)
    assert first.guaranteed
    other = submit(driver, "other", steps=100, deadline_s=22.0)
    for number in range(4):
        submit(driver, f"short{number}", steps=30)
    for _ in range(60):
        train(driver, 0.5)
        if first.ranks[0].step >= 100 and not first.state.ended:
            end(driver, "first")
            obey(driver)
    assert (first.state, first.deadline_missed) == (JobState.SUCCEEDED, False)
    assert other.guaranteed is False, "there is no time for both"


def test_a_new_job_is_timed_at_once_but_not_at_the_expense_of_leases() -> None:
    driver = chronus()
    submit(driver, "endless")
    train(driver, 1.0)
    job = submit(driver, "a", steps=100, deadline_s=12.0)
    assert job.state is JobState.RUNNING, "not at the end of somebody's turn"
    train(driver, 6.0)
    assert job.guaranteed
    assert driver.core.ledger.holders(0) == (job,), "it has the lease that began at 4 s"
    late = submit(driver, "late", steps=10, deadline_s=50.0)
    assert late.state is JobState.QUEUED


def test_one_that_needs_longer_than_it_said_goes_on_without_its_guarantee() -> None:
    driver = chronus()
    job = submit(driver, "a", steps=50, deadline_s=12.0)
    submit(driver, "other")
    train(driver, 2.0)
    assert job.guaranteed
    train(driver, 7.0)
    assert job.steps > 50
    assert (job.guaranteed, job.state.ended, job.deadline_missed) == (False, False, False)
    assert told_of(driver, "guarantee_lost") == ["a"]
    train(driver, 6.0)
    assert driver.core.jobs["other"].service_at(driver.now_s) > 0


def test_a_wrong_estimate_is_mended_by_what_is_measured_later() -> None:
    driver = chronus()
    job = submit(driver, "a", steps=200, deadline_s=40.0)
    submit(driver, "other")
    train(driver, 2.0, step_s=0.1)
    assert job.guaranteed
    train(driver, 32.0, step_s=0.5)
    assert job.guaranteed is False, "its later steps take five times as long"
    assert not job.state.ended


def test_whoever_turns_out_longer_loses_its_guarantee_and_nobody_else() -> None:
    driver = chronus()
    slow = submit(driver, "a", steps=60, deadline_s=36.0)
    train(driver, 2.0)
    other = submit(driver, "b", steps=200, deadline_s=36.0)
    train(driver, 2.0)
    assert (slow.guaranteed, other.guaranteed) == (True, True)
    for _ in range(70):
        train(driver, 0.5, a=0.5)
        if other.ranks[0].step >= 200 and not other.state.ended:
            end(driver, "b")
            obey(driver)
    assert slow.guaranteed is False
    assert (other.state, other.guaranteed, other.deadline_missed) == (JobState.SUCCEEDED, True, False)


def test_what_was_guaranteed_is_not_stopped_when_its_owner_brings_it_back_too_late() -> None:
    driver = chronus()
    job = submit(driver, "a", steps=100, deadline_s=30.0, only=True)
    train(driver, 2.0)
    driver.do(Held("a"))
    obey(driver)
    train(driver, 20.0)
    driver.do(Released("a"))
    obey(driver)
    train(driver, 4.0)
    assert (job.guaranteed, job.state) == (False, JobState.RUNNING)


def test_leases_outlast_a_change_after_which_the_policy_starts_again() -> None:
    driver = chronus()
    submit(driver, "endless")
    train(driver, 1.0)
    a = submit(driver, "a", steps=100, deadline_s=12.0)
    train(driver, 3.5)
    assert driver.core.ledger.holders(0) == (a,), "its lease began at 4 s"
    submit(driver, "short", steps=10)
    driver.do(Weighted("endless", 2.0))
    train(driver, 3.0)
    assert driver.core.ledger.holders(0) == (a,), "at 6 s only those without a lease are looked at anew"


def test_leases_that_could_not_begin_do_when_the_policy_is_asked_again() -> None:
    class Refused(Chronus):
        when_s = 8.0

        def plan(self, view: View) -> Plan:
            plan = super().plan(view)
            if view.now_s >= self.when_s:
                self.when_s = 1e9
                raise PolicyError("not now")
            return plan

    driver = Driver(1, Refused(lease_s=4.0, best_effort_lease_s=2.0, horizon=20, solver="greedy"))
    submit(driver, "endless")
    train(driver, 1.0)
    a = submit(driver, "a", steps=100, deadline_s=16.0)
    train(driver, 6.0)
    assert (a.guaranteed, a.running) == (True, False), "there is time: it has the leases from 8 s on"
    train(driver, 2.5)
    assert told_of(driver, "policy_failed") == [""]
    assert driver.core.ledger.holders(0) == (a,)


def test_policies_that_know_no_deadlines_count_the_misses_all_the_same() -> None:
    driver = Driver()
    late, early, given_up = (submit(driver, name, deadline_s=10.0) for name in ("late", "early", "given up"))
    driver.wake(5.0)
    obey(driver)
    end(driver, "early")
    driver.do(Cancelled("given up", "enough"))
    obey(driver)
    driver.now_s += 6.0
    end(driver, "late")  # before anybody looked at the clock
    assert [job.deadline_missed for job in (late, early, given_up)] == [True, False, False]
    assert [job.guaranteed for job in (late, early, given_up)] == [None, None, None]
    with pytest.raises(UsageError, match="wants its deadline guaranteed, which this policy never does"):
        submit(driver, "insists", deadline_s=10.0, only=True)


def test_a_policy_that_fails_when_asked_what_it_guarantees_takes_no_job_along() -> None:
    class Broken(Fifo):
        def guaranteed(self, job: str) -> bool | None:
            raise RuntimeError("who knows")

    driver = Driver(1, Broken())
    job = submit(driver, "a", steps=100, deadline_s=60.0)
    assert told_of(driver, "policy_failed") == [""]
    train(driver, 2.0)
    assert (job.state, job.guaranteed) == (JobState.RUNNING, None)


def test_nobody_is_told_twice_of_a_missed_deadline() -> None:
    driver = Driver()
    submit(driver, "a", deadline_s=1.0)
    for _ in range(3):
        driver.wake(1.0)
    end(driver, "a", 1)
    assert told_of(driver, "deadline_missed") == ["a"]


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_that_has_failed_misses_its_deadline_however_often_it_may_restart(restarts: int) -> None:
    driver = Driver()
    for name in "ab":
        spec = JobSpec(id=name, submit_s=0.0, deadlines=((60.0, 1.0),), max_restarts=restarts)
        driver.do(Submitted(spec, PROGRAM))
        driver.hello(name)
        obey(driver)
        if name == "a":
            end(driver, "a", 1)
    driver.do(Cancelled("b", "not needed"))
    obey(driver)
    assert driver.core.jobs["a"].state is JobState.FAILED
    assert told_of(driver, "deadline_missed") == []
    driver.wake(61.0)
    driver.wake(61.0)
    assert told_of(driver, "deadline_missed") == ["a"]


def test_a_pace_is_measured_from_the_first_step_and_follows_what_changes() -> None:
    step_time = StepTime()
    assert step_time.note(1, 30.0)  # building the model took so long
    assert not step_time.note(3, 31.0)
    assert not step_time.note(3, 31.5)
    assert step_time.step_s is None, "two steps are too few"
    step_time.note(5, 32.0)
    assert step_time.step_s == pytest.approx(0.5)
    for number in range(1, 8):
        step_time.suspended()
        step_time.note(5 + 4 * number, 32.0 + 8.0 * number)
    assert step_time.step_s == pytest.approx(2.0, rel=0.02)


def test_a_pace_is_known_after_three_steps_in_however_many_slices_and_stays_known() -> None:
    step_time = StepTime()
    step_time.note(1, 30.0)
    known = []
    for step in range(2, 6):
        step_time.suspended()
        step_time.note(step, 30.0 + 2.0 * step)
        known.append(step_time.step_s)
    assert known[:2] == [None, None]
    assert known[2] is not None
    for _ in range(10):
        step_time.suspended()
        assert step_time.step_s == pytest.approx(known[3])


def test_steps_made_on_the_way_to_the_boundary_of_a_suspend_tell_of_the_pace_as_all_do() -> None:
    driver = Driver()
    job = submit(driver, "a", steps=1000)
    driver.do(Held("a"))
    for step in range(1, 9):
        driver.progress("a", step)
        driver.now_s += 1.0
    assert job.state is JobState.SUSPENDING
    assert job.step_time.step_s == 1.0
    step_time = StepTime()
    for step in range(1, 9):
        step_time.note(step, 1.0)
    assert step_time.step_s is None, "no step takes no time"


def test_a_pace_depends_on_no_report_that_a_journal_leaves_out() -> None:
    whole, short = StepTime(), StepTime()
    for step_time, left_out in ((whole, ()), (short, (2, 3, 5))):
        for step in range(1, 8):
            if step not in left_out:
                step_time.note(step, step**1.5)
            if step == 4:
                step_time.suspended()
    assert whole == short


def test_what_is_due_beyond_the_horizon_counts_too() -> None:
    half = Claim(devices=1, work_s=60.0, within_s=100.0)
    assert not overbooked([half], 1)
    assert overbooked([half, half], 1)
    assert not overbooked([half, half], 2)
    assert not overbooked([half, Claim(1, 60.0, 120.0)], 1)


def test_what_an_owner_expects_counts_until_steps_were_timed_and_not_for_ever() -> None:
    driver = chronus()

    def add(name: str, expected_s: float, steps: int = 0) -> Gang:
        spec = JobSpec(
            id=name,
            submit_s=driver.now_s,
            steps=steps,
            expected_s=expected_s,
            deadlines=((100.0, 1.0),),
            guaranteed=True,
        )
        driver.do(Submitted(spec, PROGRAM))
        driver.hello(name)
        obey(driver)
        return driver.core.jobs[name]

    refused_job, short, optimist = add("refused", 200.0), add("short", 5.0), add("optimist", 5.0, steps=400)
    assert refused_job.state is JobState.CANCELLED
    assert (short.guaranteed, optimist.guaranteed) == (True, True)
    train(driver, 20.0)
    assert short.guaranteed is False, "it trains longer than it said"
    assert optimist.guaranteed is True, "its steps take longer than it said, but there is time for that"
    assert set(told_of(driver, "guarantee_lost")) == {"short"}
