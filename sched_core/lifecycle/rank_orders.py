"""Orders to the ranks of a job: to come, to stop at one boundary, to run to the end, to end."""

from __future__ import annotations

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import Rank, RankPhase
from gpuslice.wire import Dismiss, Resume, Suspend

from .state import State

#: A ``stop_at`` that no rank ever reaches. It calls a suspend off.
NEVER = 2**62


def resume_rank(state: State, job: Gang, rank: int) -> None:
    """Tell a parked rank of ``job`` to come, or come back, to its device."""
    job.ranks[rank].come()
    device = str(state.devices[job.lease[rank]].on(""))
    width, world = (job.width, job.world) if job.spec.joined else (0, 0)
    state.tell(job, rank, Resume(epoch=job.epoch, device=device, width=width, world=world))


def resume_parked(state: State, job: Gang) -> None:
    """Tell all parked ranks of ``job`` to come, or come back, to their devices."""
    for rank in job.present(RankPhase.PARKED):
        resume_rank(state, job, rank.number)


def aim(state: State, job: Gang, stop_at: int) -> None:
    """Make the gang stop at ``stop_at``. Ranks that have parked at an earlier boundary go on."""
    job.asked.aim(stop_at)
    for rank in job.training():
        if rank.phase is RankPhase.PARKED:
            if rank.boundary >= stop_at:
                continue
            resume_rank(state, job, rank.number)
        tell_to_stop(state, job, rank)


def tell_to_stop(state: State, job: Gang, rank: Rank) -> None:
    """Tell ``rank`` the boundary at which the gang is to stop."""
    leaves = job.keep is not None or state.nodes.misplaced(job)
    state.tell(job, rank.number, Suspend(epoch=job.epoch, stop_at=job.asked.stop_at, for_restart=leaves))


def let_run_to_the_end(state: State, job: Gang) -> None:
    """Cancel the suspend of ``job``, which is told to end: parked ranks could save nothing."""
    for rank in job.there():
        state.tell(job, rank.number, Suspend(epoch=job.epoch, stop_at=NEVER, ending=True))


def dismiss_waiting(state: State, job: Gang) -> None:
    """Let the ranks that wait end, too, if all ranks that train have ended."""
    if not all(rank.phase in (RankPhase.LEAVING, RankPhase.GONE) for rank in job.members):
        return
    for rank in job.waiting_ranks():
        rank.leave()
        state.tell(job, rank.number, Dismiss(epoch=job.epoch))
