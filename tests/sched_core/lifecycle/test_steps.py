"""The next step of a job, from its facts alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gpuslice import wire
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.command import Purpose, Stage
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.steps import For, Step, Waits, next_step

from ..driver import PROGRAM, put_into

NOW_S = 10.0


@dataclass
class Surroundings:
    """What ``next_step`` asks, as a test says."""

    blocked_by: Gang | None = None
    elsewhere: bool = False
    portable: bool = True
    awaits: bool = False

    def blocker(self, job: Gang) -> tuple[int, Gang] | None:
        return None if self.blocked_by is None else (job.wanted[0], self.blocked_by)

    def misplaced(self, job: Gang) -> bool:
        return self.elsewhere

    def can_leave(self, job: Gang) -> bool:
        return self.portable

    def is_awaiting(self, job: Gang) -> bool:
        return self.awaits

    def is_to_start_ahead(self, job: Gang) -> bool:
        return False

    def is_ahead_in_vain(self, job: Gang) -> bool:
        return False


def job_in(
    state: JobState,
    phase: RankPhase,
    lease: tuple[int, ...] = (),
    plan: tuple[int, ...] = (),
    *,
    ranks: int = 1,
) -> Gang:
    job = Gang(JobSpec(id="a", submit_s=0.0, devices=ranks), 0, PROGRAM)
    put_into(job, state, lease)
    job.command.go_on(Stage.STARTED)
    job.running, job.placement = bool(plan), plan
    for rank in job.ranks:
        rank.phase = phase
    return job


def waits_for(job: Gang, world: Surroundings | None = None) -> For:
    answer = next_step(job, world or Surroundings(), NOW_S)
    assert isinstance(answer, Waits)
    return answer.on


def step(job: Gang, world: Surroundings | None = None) -> Step:
    answer = next_step(job, world or Surroundings(), NOW_S)
    assert isinstance(answer, Step)
    return answer


def test_a_job_that_is_to_be_elsewhere_stops_first() -> None:
    for plan in [(1,), ()]:
        assert step(job_in(JobState.RUNNING, RankPhase.ON, lease=(0,), plan=plan)) is Step.STOP
    assert waits_for(job_in(JobState.RUNNING, RankPhase.ON, lease=(0,), plan=(0,))) is For.NOTHING


def test_a_stop_is_carried_through_though_the_job_may_stay() -> None:
    assert waits_for(job_in(JobState.SUSPENDING, RankPhase.ON, lease=(0,), plan=(0,))) is For.RANKS


def test_a_refused_suspend_is_tried_again_after_its_pause() -> None:
    job = job_in(JobState.RUNNING, RankPhase.ON, lease=(0,))
    job.refusals.suspend.failed(NOW_S)
    answer = next_step(job, Surroundings(), NOW_S)
    assert isinstance(answer, Waits)
    assert answer.on is For.MOMENT
    assert answer.until_s == job.refusals.suspend.until_s
    assert next_step(job, Surroundings(), answer.until_s) is Step.STOP


def test_a_job_with_processes_beside_its_rank_stays() -> None:
    job = job_in(JobState.RUNNING, RankPhase.ON, lease=(0,))
    job.processes.beside = (wire.Hello(version=1, job="a", rank=0, world_size=1, pid=7),)
    assert step(job) is Step.KEEP


def test_ranks_that_parked_too_early_go_on() -> None:
    job = job_in(JobState.SUSPENDING, RankPhase.PARKED, lease=(0, 1), ranks=2)
    job.asked.stop_at = 5
    assert step(job) is Step.STOP_LATER
    for rank in job.ranks:
        rank.boundary = 5
    assert waits_for(job) is For.RANKS


def test_ranks_whose_resume_was_refused_come_again() -> None:
    job = job_in(JobState.RESUMING, RankPhase.PARKED, lease=(0,), plan=(0,))
    assert step(job) is Step.COME_AGAIN
    job.refusals.resume.failed(NOW_S)
    assert waits_for(job) is For.MOMENT


def test_a_job_enters_when_nobody_else_is_on_its_devices() -> None:
    job = job_in(JobState.SUSPENDED, RankPhase.PARKED, plan=(2,))
    assert step(job) is Step.ENTER
    other = job_in(JobState.SUSPENDING, RankPhase.ON, lease=(2,))
    answer = next_step(job, Surroundings(blocked_by=other), NOW_S)
    assert isinstance(answer, Waits)
    assert (answer.on, answer.device, answer.other) == (For.DEVICE, 2, other)


def test_a_job_enters_only_with_all_of_its_ranks() -> None:
    job = job_in(JobState.QUEUED, RankPhase.PARKED, plan=(0, 1), ranks=2)
    job.ranks[1].phase = RankPhase.ABSENT
    assert waits_for(job) is For.RANKS
    assert waits_for(job_in(JobState.QUEUED, RankPhase.PARKED)) is For.PLAN


def test_processes_go_to_the_node_of_the_devices_if_the_state_can() -> None:
    job = job_in(JobState.SUSPENDED, RankPhase.PARKED, plan=(0,))
    assert step(job, Surroundings(elsewhere=True)) is Step.RELOCATE
    assert waits_for(job, Surroundings(elsewhere=True, portable=False)) is For.NODE
    job.command.end_for(Purpose.RELOCATE)
    assert waits_for(job, Surroundings(elsewhere=True)) is For.RANKS


def test_a_job_without_processes_gives_up_devices_that_it_is_not_to_have() -> None:
    job = job_in(JobState.RUNNING, RankPhase.ABSENT, lease=(0,))
    job.processes.idle_since_s = 1.0
    assert step(job) is Step.GIVE_UP


def test_the_next_attempt_waits_for_its_moment() -> None:
    job = job_in(JobState.QUEUED, RankPhase.ABSENT)
    job.not_before_s = NOW_S + 3
    answer = next_step(job, Surroundings(), NOW_S)
    assert isinstance(answer, Waits)
    assert (answer.on, answer.until_s) == (For.MOMENT, NOW_S + 3)


@pytest.mark.parametrize("phase", list(RankPhase))
@pytest.mark.parametrize("state", list(JobState))
@pytest.mark.parametrize("plan", [(), (0,), (1,)])
def test_every_joint_state_has_a_step_or_a_reason(
    state: JobState, phase: RankPhase, plan: tuple[int, ...]
) -> None:
    holds = state in (JobState.STARTING, JobState.RUNNING, JobState.SUSPENDING, JobState.RESUMING)
    job = job_in(state, phase, lease=(0,) if holds else (), plan=plan)
    for world in (Surroundings(), Surroundings(elsewhere=True), Surroundings(elsewhere=True, portable=False)):
        answer = next_step(job, world, NOW_S)
        if isinstance(answer, Waits):
            assert answer.reason or answer.on is For.NOTHING


def test_a_job_that_is_moved_again_before_it_has_trained_waits_ever_longer() -> None:
    """A policy that never rests would have it moved for ever. Meanwhile it may train where it is."""
    job, elsewhere = job_in(JobState.QUEUED, RankPhase.PARKED, plan=(0,)), Surroundings(elsewhere=True)
    job.relocation.leave_node(NOW_S, loses_time=False)
    job.relocation.renew()
    assert step(job, elsewhere) is Step.RELOCATE, "the first time at once"
    pauses_s = []
    for _ in range(8):
        job.relocation.leave_node(NOW_S, loses_time=False)
        job.relocation.renew()
        answer = next_step(job, elsewhere, NOW_S)
        assert isinstance(answer, Waits)
        pauses_s.append(answer.until_s - NOW_S)
    assert pauses_s == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert step(job) is Step.ENTER
    job.relocation.trained()
    assert step(job, elsewhere) is Step.RELOCATE


def test_a_job_that_is_started_anew_again_before_it_has_trained_waits_as_well() -> None:
    job = Gang(JobSpec(id="a", submit_s=0.0, most_devices=2, relaunch=True), 0, PROGRAM)
    job.command.go_on(Stage.STARTED)
    job.running, job.placement = True, (0, 1)
    job.ranks[0].phase = RankPhase.PARKED
    job.relocation.relaunch(NOW_S, loses_time=False, moving=False)
    assert step(job) is Step.RELAUNCH
    job.relocation.relaunch(NOW_S, loses_time=False, moving=False)
    assert waits_for(job) is For.MOMENT
    job.placement = (0,)
    assert step(job) is Step.ENTER
