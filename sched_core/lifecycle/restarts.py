"""What happens to a failed job once its processes are gone: the failure's class, and perhaps another attempt.

An attempt starts the job's command anew, under the same name. A script that called ``gpuslice.attach`` goes
on from its newest snapshot, a script with its own checkpoints from these, any other from the beginning. A
command that starts as many ranks as it is told is started anew for another number of devices, too.
"""

from __future__ import annotations

from math import inf

from gpuslice.errors import OVER_MEMORY_LIMIT
from gpuslice.sched_core.jobs.command import Purpose
from gpuslice.sched_core.jobs.failures import Failure, Kind, classify, verdict
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import Trigger

from . import unfit_nodes
from .events import Kill, Notice
from .launches import launch, leave, note_kept
from .rank_orders import let_run_to_the_end
from .state import State

#: The pause before the second attempt, in seconds. It doubles with each attempt.
BACK_OFF_S = 1.0
MAX_BACK_OFF_S = 60.0
_MOST_DOUBLINGS = 10
#: Why the processes of a job are ended that is kept.
PUT_AWAY = "it is kept while no scheduler runs"


def close(state: State, job: Gang, now: float) -> None:
    """Classify the failure of ``job``, whose processes are gone, and queue the job again if that may help."""
    if unfit_nodes.another_is_left(state, job):
        unfit_nodes.begin_elsewhere(state, job, now)
        return
    failure = unfit_nodes.verdict(state, job) or _judge(job)
    absence = _is_absence(state, job, failure, now)
    job.verdict.judge(failure, absence=absence)
    wait_s: float | None = None
    over_limit = OVER_MEMORY_LIMIT in failure.reason
    if over_limit:  # with the same limit it would fail the same way
        helps = job.may_grow
    elif absence:
        helps = True
    else:
        helps = failure.kind not in (Kind.USER, Kind.TIME_LIMIT) and job.failures < job.spec.max_restarts
    if helps and job.may_restart:
        wait_s = min(BACK_OFF_S * 2 ** min(job.failures, _MOST_DOUBLINGS), MAX_BACK_OFF_S)
    details = {
        "class": job.verdict.failure,
        "reason": job.verdict.reason,
        "exit_code": job.command.exit_code,
        "attempt": job.attempt + 1,
        "restart_in_s": wait_s,
    }
    state.order(Notice("failed" if job.tried else "trial_failed", job.id, details))
    if wait_s is not None:
        if over_limit:
            job.grow()
        job.move(Trigger.RETRY, now)
        job.begin_again(now + wait_s)
        if absence:
            job.excuse()
        state.reconcile_later(job)


def requeue(state: State, job: Gang, now: float, *, fresh: bool) -> None:
    """Queue ``job``, which has ended and has no process left, for another attempt.

    It goes on from its newest snapshot, or, if ``fresh``, from the beginning. It waits for no moment and no
    other job, and its time limit begins anew.
    """
    job.move(Trigger.RETRY, now)
    job.begin_again(now)
    job.pardon()
    job.conditions.waive()
    job.count_devices_anew()
    if fresh:
        job.command.begin_anew()
    state.reconcile_later(job)


def end_to_relaunch(state: State, job: Gang, now: float) -> None:
    """Tell ``job`` to end, so that its command can be started for another number of devices.

    The job has parked or has not begun. A script that gets SIGTERM for it has its state back, and may save
    it, until the next boundary. A job whose processes were to be started on another node is now started there
    for the new number.
    """
    state.order(Notice("relaunched", job.id, {"from": len(job.ranks), "to": len(job.wanted)}))
    _end_patiently(state, job, "it is started anew for other devices", now)


def put_away(state: State, job: Gang, now: float) -> None:
    """Tell ``job``, which has parked or has not begun, to end, so that it can be started again later.

    A command that keeps its own checkpoints may save first.
    """
    if job.spec.relaunch and job.allows(Trigger.RELAUNCH):
        _end_patiently(state, job, PUT_AWAY, now)
    else:
        leave(state, job, PUT_AWAY, now)


def _end_patiently(state: State, job: Gang, reason: str, now: float) -> None:
    """Tell ``job`` to end within its grace time, for ``reason``."""
    job.relocation.relaunch(now, loses_time=job.processes.trains, moving=job.relocating)
    job.move(Trigger.RELAUNCH, now)
    state.switch_costs.forget(job)
    state.order(Kill(job.id, reason, job.attempt, Purpose.RELAUNCH))
    let_run_to_the_end(state, job)
    relaunch_if_gone(state, job, now)


def relaunch_if_gone(state: State, job: Gang, now: float) -> None:
    """Start the command of ``job``, which was told to end for a relaunch, if no process of it is left."""
    if not job.processes_gone:
        return
    state.vacate(job)
    job.move(Trigger.RETRY, now)
    job.begin_elsewhere(now, ranks=len(job.wanted))
    if job.running:
        job.progress_from(inf)  # the job makes progress once its ranks are on their devices
    if job.keep:
        note_kept(state, job)
    elif not job.held:
        launch(state, job, now)
    state.reconcile_later(job)


def _is_absence(state: State, job: Gang, failure: Failure, now: float) -> bool:
    """Return True if ``job`` failed because a node did not answer, and it may begin anew for that.

    What has trained may lose its work with its node. So its owner must allow another attempt at all.
    """
    # The ranks of a gang that were not there may have failed before the silence was noticed.
    away = job.processes.cut_off or job.processes.unheard or state.nodes.any_silent(job.nodes)
    may_begin = job.spec.max_restarts > 0 or not job.may_have_begun(now)
    return away and may_begin and failure.kind is Kind.INFRASTRUCTURE


def _judge(job: Gang) -> Failure:
    """Return the class and reason of the failure of ``job``.

    If the core saw the failure before the command ended, the exit code only follows from the core's own kill.
    """
    if job.verdict.blame is None:
        return classify(job.command.exit_code or 0, job.command.said)
    if job.verdict.blame is Kind.TIME_LIMIT:
        return Failure(Kind.TIME_LIMIT, job.verdict.reason)
    found = verdict(job.command.said)
    if found is None or found.kind is Kind.INFRASTRUCTURE:
        return Failure(job.verdict.blame, job.verdict.reason)
    return Failure(found.kind, f"{job.verdict.reason}: {found.reason}")
