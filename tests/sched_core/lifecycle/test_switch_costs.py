"""What switching costs, what follows from it for slices, and how long jobs still run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gpuslice import wire
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.states import IN_TRANSIT, JobState
from gpuslice.sched_core.lifecycle.events import Exited, Kill, RankGone, Submitted
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.switch_cost_model import CostModel, Half, Line, State

from ..driver import PROGRAM, QUANTUM_S, Driver, notices, told


def test_a_line_learns_the_fixed_part_and_the_rate() -> None:
    line = Line()
    for nbytes in (10**9, 2 * 10**9):
        line.learn(nbytes, {"find_s": 0.25, "copy_out_s": nbytes / 1e9, "parked_s": 100.0})
    assert line.predict_s(4 * 10**9) == pytest.approx(4.25)
    for _ in range(40):
        line.learn(10**9, {"find_s": 0.75, "copy_out_s": 0.5})
    assert line.predict_s(4 * 10**9) == pytest.approx(2.75, rel=0.01), "what is newer counts more"


def learn(model: CostModel, half: Half, state: State, seconds: float, *, fixed_s: float = 0.0) -> None:
    model.learn(half, state, {"find_s": fixed_s, "copy_out_s": seconds, "parked_s": 7.0})


def test_tensors_and_bytes_are_told_apart() -> None:
    line = Line()
    rng = random.Random(1)
    for _ in range(60):
        nbytes, tensors = rng.randrange(10**8, 4 * 10**9), rng.randrange(10, 5000)
        stages_s = {"find_s": 0.01 + 2e-5 * tensors, "copy_out_s": nbytes / 2e9 + 1e-5 * tensors}
        line.learn(nbytes, stages_s, tensors)
    for nbytes, tensors in ((10**9, 10), (10**9, 4000), (3 * 10**9, 800)):
        truth_s = 0.01 + nbytes / 2e9 + 3e-5 * tensors
        assert line.predict_s(nbytes, tensors) == pytest.approx(truth_s, rel=0.05)


def test_a_state_that_was_moved_before_is_predicted_by_what_it_took() -> None:
    line = Line()
    quick, slow = 10**9, 10**9 + 1  # alike for every fit
    for _ in range(20):
        line.learn(quick, {"copy_out_s": 1.0})
        line.learn(slow, {"copy_out_s": 4.0})
    assert line.predict_s(quick) == pytest.approx(1.0, rel=0.3)
    assert line.predict_s(slow) == pytest.approx(4.0, rel=0.3)
    assert 1.5 < line.predict_s(10**9 + 2) < 3.5, "of another one nothing is known but the fit"
    for number in range(2000):
        line.learn(number + 1, {"copy_out_s": 1e-9})
    assert line.predict_s(slow) == pytest.approx(line.predict_s(slow + 1)), "forgotten for newer ones"


def test_the_error_is_what_predictions_were_off_by() -> None:
    line, rng = Line(), random.Random(3)
    assert line.estimate(10**9).error_s is None
    inside = 0
    for number in range(300):
        nbytes = rng.randrange(10**8, 10**9)
        actual_s = (0.02 + nbytes / 1e9) * rng.gauss(1.0, 0.1)
        found = line.estimate(nbytes)
        if number >= 20:
            assert found.error_s is not None
            inside += abs(actual_s - found.seconds) <= 2 * found.error_s
        line.learn(nbytes, {"find_s": actual_s * 0.1, "copy_in_s": actual_s * 0.9})
    assert inside / 280 >= 0.85, "two standard errors"


def test_each_device_and_route_has_a_fit_of_its_own() -> None:
    model = CostModel()
    state = State(10**9, 10, "cuda:0", "tensor")
    assert model.switch(state) is None
    learn(model, Half.SUSPEND, state, 0.1)
    learn(model, Half.SUSPEND, state._replace(device="cuda:1"), 0.4)
    learn(model, Half.SUSPEND, state._replace(route="vmm"), 0.7)
    learn(model, Half.RESUME, state, 0.2)
    suspends = [("cuda:0", "tensor", 0.1), ("cuda:1", "tensor", 0.4), ("cuda:0", "vmm", 0.7)]
    for device, route, seconds in suspends:
        found = model.predict(Half.SUSPEND, state._replace(device=device, route=route))
        assert found is not None
        assert found.seconds == pytest.approx(seconds)
    elsewhere = model.predict(Half.SUSPEND, state._replace(device="cuda:7"))
    assert elsewhere is not None
    assert 0.1 < elsewhere.seconds < 0.7, "what it costs on the others"
    moved = model.migration(state, "cuda:1")
    assert moved is not None
    assert moved.seconds == pytest.approx(0.1 + 0.2), "as much as a resume, while nobody has moved"
    learn(model, Half.MIGRATION, state._replace(device="cuda:1"), 0.9)
    moved = model.migration(state, "cuda:1")
    assert moved is not None
    assert moved.seconds == pytest.approx(1.0)


def test_a_move_is_predicted_by_what_moves_to_that_device_cost() -> None:
    driver = Driver(2)
    driver.submit("a")
    driver.hello("a")
    driver.resumed("a")
    driver.progress("a", 1)
    switching, job = driver.core.state.switch_costs, driver.core.jobs["a"]
    half: dict[str, Any] = {"epoch": 1, "boundary": 1}
    suspended = wire.Suspended(**half, step=1, nbytes=10**9, stages_s={"copy_out_s": 1.0})
    (present,) = job.lease
    for came_from, seconds in ((present, 2.0), (1 - present, 5.0)):
        job.lease = (came_from,)
        switching.parked(job, 0, suspended)
        job.lease = (present,)
        switching.resumed(job, 0, wire.Resumed(**half, stages_s={"copy_in_s": seconds}))
    stays, moves = switching.predict(job), switching.predict(job, (1 - present,))
    assert stays is not None
    assert moves is not None
    assert (stays.seconds, moves.seconds) == (pytest.approx(3.0), pytest.approx(6.0))


def switch(driver: Driver, *, nbytes: int = 10**9, out_s: float = 0.2, in_s: float = 0.1) -> list[object]:
    """Carry the switch out that the core has ordered; what it noticed."""
    found: list[object] = []
    while moving := [job for job in driver.core.jobs.values() if job.state in IN_TRANSIT]:
        for job in moving:
            message: wire.FromAgent
            if job.state is JobState.SUSPENDING:
                message = wire.Suspended(
                    epoch=job.epoch,
                    boundary=job.asked.stop_at,
                    step=job.asked.stop_at,
                    nbytes=nbytes,
                    stages_s={"copy_out_s": out_s},
                    tensors=40,
                    route="tensor",
                )
            else:
                stages = {"copy_in_s": in_s, "parked_s": 9.0} if job.ranks[0].boundary else {}
                message = wire.Resumed(epoch=job.epoch, boundary=job.ranks[0].boundary, stages_s=stages)
            found += notices(driver.say(job.id, message))
    return found


def test_the_stages_that_are_shown_are_those_of_the_slowest_rank() -> None:
    driver = Driver(2)
    driver.running_gang(2)
    costs, gang = driver.core.state.switch_costs, driver.core.jobs["g"]
    costs.begun(gang)
    for rank, out_s in enumerate((0.5, 0.25)):
        stages_s = {"copy_out_s": out_s, "publish_s": 0.125, "device": 7.0 * rank}
        parked = wire.Suspended(epoch=gang.epoch, boundary=11, step=11, nbytes=8, stages_s=stages_s)
        costs.parked(gang, rank, parked)
    costs.parked(
        gang,
        0,
        wire.Suspended(epoch=gang.epoch, boundary=12, step=12, nbytes=8, stages_s={"copy_out_s": 9.0}),
    )
    notice = costs.ended(gang)
    assert notice is not None
    assert notice.details["actual_s"] == 9.625
    assert (notice.details["copy_out_s"], notice.details["publish_s"]) == (9.5, 0.125)
    assert notice.details["device"] == "null:0,null:1", "no stage takes the name of what is told besides"


def test_switches_are_predicted_and_the_prediction_is_shown_beside_the_truth() -> None:
    driver = Driver()
    driver.running_pair()
    details = []
    for _ in range(6):
        driver.wake(10.0)
        details += [notice.details for notice in switch(driver) if notice.job == "a"]  # type: ignore[attr-defined]
        driver.progress("b", 1)
    expected = {
        "predicted_s": pytest.approx(0.3),
        "predicted_error_s": pytest.approx(0.0, abs=1e-9),
        "actual_s": pytest.approx(0.3),
        "bytes": 10**9,
        "tensors": 40,
        "route": "tensor",
        "device": "null:0",
        "migrated": False,
        "copy_out_s": pytest.approx(0.2),
        "copy_in_s": pytest.approx(0.1),
    }
    assert details[0] == expected | {"predicted_s": None, "predicted_error_s": None}
    assert details[-1] == expected
    job = driver.core.jobs["a"]
    assert (job.switch.predicted_s, job.switch.cost_s) == (pytest.approx(0.3), pytest.approx(0.3))


def test_slices_last_until_switching_stays_under_its_share() -> None:
    driver = Driver()
    driver.running_pair()
    for _ in range(4):
        driver.wake(10.0)
        switch(driver)
        driver.progress("b", 1)
    assert driver.core.state.switch_costs.least_slice_s() == pytest.approx(0.3 / 0.03)
    driver.wake()
    begin_s = driver.core.allocation.planning.wake_s
    assert begin_s is not None
    driver.wake(begin_s - driver.now_s)
    switch(driver)
    end_s = driver.core.allocation.planning.wake_s
    assert end_s is not None
    assert 10 * QUANTUM_S <= end_s - begin_s <= 11 * QUANTUM_S
    for job in "ab":
        driver.do(Exited(job, 0))
        driver.do(RankGone(job, 0))
    assert driver.core.state.switch_costs.least_slice_s() == 0.0, "what is gone is not switched"


TICK_S = 0.5


def slices(policy: str, options: dict[str, Any], *, share: float) -> list[tuple[float, float]]:
    """How long slices lasted that a policy ended, and had to; jobs keep coming, ever shorter."""
    driver = Driver(1, make_policy(policy, options), switch_share=share)
    jobs = driver.core.jobs
    found: list[tuple[float, float]] = []

    def carry_out(least_s: float) -> None:
        for job in jobs.values():
            if job.state is JobState.SUSPENDING:
                found.append((driver.now_s - since_s[job.id], least_s))
        switch(driver, out_s=0.12, in_s=0.06)
        since_s.update({job.id: job.since_s for job in jobs.values() if job.running})

    since_s: dict[str, float] = {}
    for tick in range(120):
        driver.now_s = TICK_S * tick
        least_s = driver.core.state.switch_costs.least_slice_s()
        if tick % 6 == 0 and tick < 60:
            spec = JobSpec(id=f"j{tick}", submit_s=driver.now_s, steps=1000 - 10 * tick)
            driver.do(Submitted(spec, PROGRAM))
            driver.hello(spec.id)
            carry_out(least_s)
        for job in jobs.values():
            if job.state is JobState.RUNNING:
                driver.progress(job.id, job.ranks[0].boundary + 1)
                since_s[job.id] = job.since_s
        wake_s = driver.core.allocation.planning.wake_s
        if wake_s is not None and wake_s <= driver.now_s:
            driver.wake(0.0)
        carry_out(least_s)
    return found


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("2das", {"thresholds": (1.0,)}),
        ("gittins", {"thresholds": (1.0,)}),
        ("las", {"quantum_s": 1.0}),
        ("srtf", {}),
    ],
)
def test_nobody_is_suspended_before_the_slice_was_worth_its_switch(
    policy: str, options: dict[str, Any]
) -> None:
    impatient = [lasted_s for lasted_s, _ in slices(policy, options, share=0.0)]
    assert min(impatient) < 3.5
    patient = [pair for pair in slices(policy, options, share=0.03) if pair[1] > 3.5]
    assert len(patient) > 2
    assert all(lasted_s >= least_s - 1e-6 for lasted_s, least_s in patient)


@pytest.mark.parametrize("policy", ["gandiva", "rr"])
def test_slices_that_end_together_are_as_long_as_is_worth_their_switches(policy: str) -> None:
    patient = slices(policy, {"quantum_s": 1.0}, share=0.03)[-4:]
    # Whoever comes back sees the end of the slice from the next tick on.
    assert all(lasted_s >= least_s - TICK_S - 1e-6 for lasted_s, least_s in patient)
    assert all(lasted_s < 3.5 for lasted_s, _ in slices(policy, {"quantum_s": 1.0}, share=0.0)[-4:])


def test_the_most_expensive_job_counts_for_as_long_as_it_is_there_and_as_large() -> None:
    driver = Driver()
    driver.running_pair()
    sizes = {"a": 10**9, "b": 10**6}
    switching, jobs = driver.core.state.switch_costs, driver.core.jobs
    for job, nbytes in sizes.items():
        stages = {"copy_out_s": nbytes / 1e9}
        message = wire.Suspended(epoch=1, boundary=1, step=1, nbytes=nbytes, stages_s=stages)
        switching.parked(jobs[job], 0, message)
    assert switching.least_slice_s() == pytest.approx(1.0 / 0.03)
    small = wire.Suspended(epoch=1, boundary=1, step=1, nbytes=10**3, stages_s={"copy_out_s": 1e-6})
    switching.parked(jobs["a"], 0, small)
    assert switching.least_slice_s() == pytest.approx(1e-3 / 0.03, rel=0.01)
    switching.forget(jobs["b"])
    assert switching.least_slice_s() == pytest.approx(1e-6 / 0.03, rel=0.01)


def progress(driver: Driver, job: str, step: int) -> None:
    epoch = driver.core.jobs[job].epoch
    driver.say(job, wire.Progress(epoch=epoch, boundary=step, step=step))


def test_srtf_runs_whoever_is_measured_to_have_least_left() -> None:
    driver = Driver(1, make_policy("srtf"))
    for job, steps in (("long", 1000), ("short", 100), ("secret", 0)):
        driver.do(Submitted(JobSpec(id=job, submit_s=driver.now_s, steps=steps), PROGRAM))
        driver.hello(job)
    jobs = driver.core.jobs
    driver.resumed("long")
    driver.now_s += 10.0
    progress(driver, "long", 10)
    assert told(driver.wake(), wire.Suspend) != [], "990 s left: the one not measured yet goes first"
    driver.parked("long", 11)
    driver.resumed("short")
    assert jobs["short"].lease == (0,)
    driver.now_s += 10.0
    progress(driver, "short", 10)
    assert told(driver.wake(), wire.Suspend) == [], "90 s left"
    driver.do(Exited("short", 0))
    driver.do(RankGone("short", 0))
    assert jobs["long"].lease == (0,), "nobody knows how long the other takes"


def before_its_last_step() -> Driver:
    """Job ``a`` has made 49 of at most 50 steps, ``b`` waits."""
    driver = Driver()
    driver.do(Submitted(JobSpec(id="a", submit_s=driver.now_s, max_steps=50), PROGRAM))
    driver.submit("b")
    for job in "ab":
        driver.hello(job)
    driver.resumed("a")
    driver.progress("a", 49)
    return driver


def test_a_job_that_has_made_its_steps_ends_well_at_a_boundary() -> None:
    driver = before_its_last_step()
    assert driver.progress("a", 30) == []
    assert told(driver.progress("a", 51), wire.Suspend) == [("a", 0, wire.Suspend(epoch=1, stop_at=52))]
    assert driver.progress("a", 51) == [], "said once"
    assert any(isinstance(command, Kill) for command in driver.parked("a", 52))
    assert (driver.state("a"), driver.state("b")) == (JobState.SUCCEEDED, JobState.STARTING)
    driver.do(Exited("a", -15))
    driver.do(RankGone("a", 0))
    assert driver.state("a") is JobState.SUCCEEDED
    assert driver.core.jobs["a"].processes_gone


def test_a_job_that_parks_for_others_after_its_last_step_ends_there() -> None:
    driver = before_its_last_step()
    driver.wake()
    driver.parked("a", 50)
    assert driver.state("a") is JobState.SUCCEEDED
