"""The nodes on which the command of a job cannot be started: each is tried once, then it is not for that job.

A node may lack what another has: a program, an interpreter, a directory. That is no failure of the job while
there is a node that has not been tried. If no node can start the command, the command is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuslice.errors import UsageError
from gpuslice.sched_core.jobs.failures import Failure, Kind
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import Trigger
from gpuslice.types import shortened

from .events import Exited, Notice
from .node_map import listed
from .state import State

#: Exit codes of shells, agents and supervisors for a command that cannot be executed, or does not exist.
_CODES = {126: "its command cannot be executed", 127: "its command does not exist"}
_MARK = "gpuslice: "
_REASON_CHARACTERS = 300


def note(state: State, job: Gang, event: Exited) -> None:
    """Note the node on which the command of ``job`` could not be started, if ``event`` says so.

    A command that has started a rank has begun, whatever its exit code is.
    """
    began = job.processes.first_hello_s is not None or job.processes.idle_since_s is not None
    if state.nodes.single or began or event.code not in _CODES or job.command.first_code:
        return
    names = state.nodes.named(job.nodes)
    node = job.nodes[0 if event.node is None else names.index(event.node)]
    last = event.said.strip().splitlines()[-1:] or [_CODES[event.code]]
    job.command.avoid(node, shortened(last[0].removeprefix(_MARK), _REASON_CHARACTERS))


def another_is_left(state: State, job: Gang) -> bool:
    """Return True if ``job`` failed only since it could not be started on a node, and others can be tried."""
    return job.command.not_begun and not job.given_up and state.nodes.has_room(job)


def begin_elsewhere(state: State, job: Gang, now: float) -> None:
    """Queue ``job``, which could not be started on a node, for the others. That is no restart of the job."""
    node, reason = list(job.command.not_for.items())[-1]
    where = listed(state.nodes.named((node,)))
    job.verdict.judge(Failure(Kind.INFRASTRUCTURE, f"node {where} cannot start it: {reason}"))
    state.order(Notice("not_started", job.id, {"node": where, "reason": reason, "attempt": job.attempt + 1}))
    job.move(Trigger.RETRY, now)
    job.begin_again(now)
    job.command.miss()
    state.nodes.restrict(job)
    state.reconcile_later(job)


def verdict(state: State, job: Gang) -> Failure | None:
    """Return the failure of ``job`` if no node can start it; None if that is not why it failed."""
    if not job.command.not_begun or state.nodes.has_room(job):
        return None
    said = "; ".join(
        f"{listed(state.nodes.named((node,)))}: {reason}" for node, reason in job.command.not_for.items()
    )
    few = "no node" if not state.nodes.fitting(job) else "too few nodes"
    return Failure(Kind.USER, f"{few} can start it: {said}")


def check(state: State, job: Gang, devices: Sequence[int]) -> None:
    """Raise ``UsageError`` if one of ``devices`` is on a node on which ``job`` could not be started."""
    for node in state.nodes.of(devices):
        if (reason := job.command.not_for.get(node)) is not None:
            where = listed(state.nodes.named((node,)))
            raise UsageError(
                f"node {where} cannot start job {job.id}: {reason}", "name devices of other nodes"
            )


def forget(state: State, name: str) -> None:
    """Have jobs tried anew on the node ``name``, which was away: it may have by now what it lacked."""
    for job in state.jobs.values():
        for node in [node for node in job.command.not_for if state.nodes.named((node,)) == (name,)]:
            job.command.try_again(node)
            if job.spec.elastic:
                state.nodes.confine(job)
            else:
                state.nodes.restrict(job)
