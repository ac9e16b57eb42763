"""What happens to a job when all of its ranks have come, parked or begun to train, and how it ends."""

from __future__ import annotations

from math import inf

from gpuslice.sched_core.jobs.command import Purpose
from gpuslice.sched_core.jobs.failures import Kind
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState, Trigger

from . import ahead, launches, restarts
from .events import Kill, Notice
from .rank_orders import NEVER, aim, let_run_to_the_end, resume_parked
from .state import News, State

#: Why the processes of a job are told to end that ends by a trigger.
_PURPOSES = {Trigger.SUCCEED: Purpose.SUCCEED, Trigger.FAIL: Purpose.FAIL, Trigger.CANCEL: Purpose.CANCEL}


def grant(state: State, job: Gang, devices: tuple[int, ...], rate: float, now: float) -> None:
    """Give ``job`` a lease on ``devices``, which it can enter now, and tell its ranks to come.

    ``rate`` is its progress per second there, in seconds of a dedicated run.
    """
    job.move(Trigger.GRANT, now)
    job.begin_epoch()
    state.touch(job)
    state.occupy(job, devices)
    job.change_rate(rate, now)
    job.book(now)
    resume_parked(state, job)


def settle(state: State, job: Gang, now: float) -> None:
    """Complete the start, resume or suspend of ``job`` if all its ranks have arrived or parked."""
    job.book(now)
    if job.all_on() and job.allows(Trigger.ALL_ON):
        _complete_entry(state, job, now)
    elif job.all_parked() and job.allows(Trigger.ALL_PARKED):
        _complete_suspend(state, job, now)


def _complete_entry(state: State, job: Gang, now: float) -> None:
    job.move(Trigger.ALL_ON, now)
    job.refusals.resume.succeeded()
    if job.placed and not job.lent:
        job.progress_from(job.counts_from(now))
        state.tell_allocation(News.BEGUN, job)
    job.first_start_s = now if job.first_start_s is None else job.first_start_s
    if (notice := state.switch_costs.ended(job)) is not None:
        state.order(notice)
    state.plan_due = True


def _complete_suspend(state: State, job: Gang, now: float) -> None:
    job.stand_still()
    job.count_leaving()
    job.refusals.suspend.succeeded()
    if job.needs_relaunch and not job.reached_max_steps:
        restarts.end_to_relaunch(state, job, now)
        return
    state.leave(job, Trigger.ALL_PARKED, now)
    state.tell_allocation(News.PARKED, job)
    state.nodes.confine(job)
    if job.reached_max_steps:
        end(state, job, Trigger.SUCCEED, f"it has made its {job.spec.max_steps} steps", now)


def begin(state: State, job: Gang, now: float) -> None:
    """Note that ``job`` trains: its set-up is over, and attained service counts from now on."""
    if job.relocation.gone_s is None and job.setup_since_s is not None:
        state.switch_costs.relocations.started(job, now - job.setup_since_s)
    job.end_setup(now)
    job.lateness.trained()
    job.state_nodes = job.nodes
    state.nodes.confine(job)
    state.order(Notice("began", job.id, {"setup_s": job.setup_s}))
    launches.arrived(state, job, now)
    if job.placed and job.since_s < inf:
        job.progress_from(now)
        state.tell_allocation(News.BEGUN, job)


def lose_state(job: Gang) -> None:
    """Note that no node has anything of the state of ``job`` any more."""
    job.state_nodes = ()


def finish(state: State, job: Gang, now: float) -> None:
    """Have ``job``, which has made all its steps, stop at its next boundary, where it succeeds."""
    if not job.finishing:
        job.finish()
        job.history.append((now, "all its steps are made"))
        state.reconcile_later(job)


def call_off(state: State, job: Gang, now: float) -> None:
    """Cancel the suspend of ``job``: its ranks go on, and ranks that have parked come back."""
    job.move(Trigger.STAY, now)
    aim(state, job, NEVER)
    state.reconcile_later(job)
    settle(state, job, now)


def stay(state: State, job: Gang) -> bool:
    """Have the policy, or a trial that wants the devices, plan with the devices that ``job`` still holds.

    Return False if the job must leave all the same: its owner holds it, its tenant's quota has no room for
    it, or a device that it has is closed to it.
    """
    if not (job.lent or job.shown) or not job.may_have(job.lease):
        return False
    state.tell_allocation(News.STAYS, job)
    return True


def end(
    state: State, job: Gang, trigger: Trigger, reason: str, now: float, blame: Kind | None = None
) -> None:
    """End ``job`` as succeeded, failed or cancelled, as ``trigger`` says; kill the processes it has left.

    Parameters
    ----------
    blame
        The class of the failure, if it is known before the command has ended.

    Raises
    ------
    IllegalTransitionError
        If it has ended before.
    """
    job.move(trigger, now)
    job.verdict.conclude(reason, now, blame)
    state.unreconciled.pop(job.id, None)
    state.touch(job)
    ahead.give_up(state, job)
    state.switch_costs.forget(job)
    state.switch_costs.relocations.forget(job)
    if job.processes_gone:
        close_if_gone(state, job, now)
    else:
        job.command.end_for(_PURPOSES[trigger])
        state.order(Kill(job.id, reason or job.state.value, job.attempt, _PURPOSES[trigger]))
        let_run_to_the_end(state, job)


def close_if_gone(state: State, job: Gang, now: float) -> None:
    """Finish with the processes of ``job``, which has ended or is to change its node, once all are gone.

    A job that changes its node is started there. An ended job frees its devices, and a failure is judged.
    """
    if job.processes_gone and not job.state.ended:
        launches.go_on(state, job, now)
    elif job.processes_gone:
        state.vacate(job)
        if job.state is JobState.FAILED:
            restarts.close(state, job, now)
