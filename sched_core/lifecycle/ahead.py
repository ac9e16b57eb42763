"""Start the process of a job on the node that it goes to, before its state is there.

The process imports what it needs and then waits: it has no lease, and it greets only when its command is
started in its turn, which is when the state has arrived. A job that trains goes on meanwhile, and leaves
when the process waits, or after ``AHEAD_S``. If the job goes elsewhere after all, the process is ended.

That holds for jobs of one rank that have trained. Whether the process is there decides nothing else: a
command that was not started ahead is started in its turn.
"""

from __future__ import annotations

from gpuslice.sched_core.jobs.gang import Gang

from .events import GiveUpAhead, StartAhead, WaitsAhead
from .state import State

#: How long a job trains on at most until its next process waits.
AHEAD_S = 30.0


def start(state: State, job: Gang, now: float) -> None:
    """Start the next process of ``job``, which trains, on the node that it goes to."""
    node = state.nodes.of(job.wanted)[0]
    _start(state, job, node, job.attempt + 1)
    job.relocation.train_until(now + AHEAD_S)


def start_at_goal(state: State, job: Gang) -> None:
    """Start the process of ``job`` on its node, to which its state is brought meanwhile."""
    if state.nodes.may_start_ahead(job):
        _start(state, job, job.nodes[0], job.attempt)


def _start(state: State, job: Gang, node: int, attempt: int) -> None:
    if job.relocation.ahead != (node, attempt):
        give_up(state, job)
        job.relocation.start_ahead(node, attempt)
        state.order(StartAhead(job.id, attempt, *state.nodes.named((node,))))


def give_up(state: State, job: Gang) -> None:
    """End the process of ``job`` that was started ahead, if there is one."""
    if job.relocation.ahead is not None:
        node, _ = job.relocation.ahead
        job.relocation.forget_ahead(settled=job.lease == job.wanted)
        state.order(GiveUpAhead(job.id, *state.nodes.named((node,))))


def take(state: State, job: Gang) -> None:
    """Note that the command of ``job`` is started in its turn. A process elsewhere is ended."""
    if job.relocation.ahead == (job.nodes[0], job.attempt):
        job.relocation.forget_ahead(settled=True)
    give_up(state, job)


def waits(state: State, job: Gang, event: WaitsAhead, now: float) -> None:
    """Note that the process of ``job`` that was started ahead waits, or has ended.

    Raises
    ------
    IllegalTransitionError
        If there is no such process; nothing was changed.
    """
    if job.relocation.ahead is None or job.relocation.ahead[1] != event.attempt:
        raise job.illegal(f"WaitsAhead of attempt {event.attempt + 1}")
    job.relocation.train_until(now)
    state.reconcile_later(job)
