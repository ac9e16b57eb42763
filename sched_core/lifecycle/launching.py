"""The answers of the shell about the start of a job's command, in the order of ``command.Stage``; its end.

If the state of the job is on other nodes, it is brought first. If the command has a part on each of several
nodes, a port is found at which its ranks meet. Then the shell is ordered to start it. Each answer of the
shell is an event that names the attempt. So another scheduler knows from the journal what is still to be
ordered, and nothing is started twice.
"""

from __future__ import annotations

import signal

from gpuslice.sched_core.jobs.command import Purpose, Stage
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState, Trigger
from gpuslice.types import shortened

from . import restarts, unfit_nodes
from .events import Brought, Exited, Kill, Notice, PortFound, StateWaits
from .job_steps import close_if_gone, end, lose_state
from .launches import bring, go_back, meet, start
from .node_map import listed
from .reports import is_news_of_exit
from .state import State

#: The exit code of a command that was never started, or whose node is lost.
KILLED = -signal.SIGKILL
_SAID_CHARACTERS = 4096


def take(state: State, job: Gang, event: Brought | StateWaits | PortFound, now: float) -> None:
    """Take an answer of the shell about the start of ``job``, and order what follows.

    Raises
    ------
    IllegalTransitionError
        If the command does not wait for that answer; nothing was changed.
    """
    stage = Stage.MEETING if isinstance(event, PortFound) else Stage.BRINGING
    if event.attempt != job.attempt or job.command.stage is not stage:
        raise job.illegal(f"{type(event).__name__} of attempt {event.attempt + 1}")
    match event:
        case StateWaits():
            job.command.wait_for_state(event.reason)
        case Brought(gone=True) if job.spec.max_restarts and not job.told_to_end:
            lose_state(job)
            job.history.append((now, "its state is gone: it begins anew"))
            state.order(Notice("begins_anew", job.id, {"reason": event.error}))
            meet(state, job)
        case Brought(error=error) if error and go_back(state, job, error, now):
            pass
        case Brought(error=error) if error:
            _command_ended(state, job, KILLED, not_brought(bring(state, job).targets, error), now)
        case _ if job.told_to_end:
            _command_ended(state, job, KILLED, "", now)
        case Brought():
            meet(state, job)
        case PortFound():
            job.command.meet_at(event.port)
            start(state, job)


def not_brought(nodes: tuple[str, ...], error: str) -> str:
    """Return the sentence that the state of a job could not be brought to ``nodes``, with ``error``."""
    return shortened(
        f"gpuslice: its state could not be brought to {listed(nodes)}: {error}", _SAID_CHARACTERS
    )


def exited(state: State, job: Gang, event: Exited, now: float) -> None:
    """Note that the command of ``job`` has ended, or its part on one of several nodes.

    The command has ended when all of its parts have, as the first part that failed. The others are told to
    end.

    Raises
    ------
    IllegalTransitionError
        If that has ended before; nothing was changed.
    """
    command, nodes = job.command, set(state.nodes.named(job.nodes))
    if not is_news_of_exit(job, event.code, event.attempt):
        return
    if event.node in command.ended_on or event.node not in {None, *nodes}:
        raise job.illegal(f"second exit with code {event.code}")
    was_told = job.told_to_end
    if not was_told:
        unfit_nodes.note(state, job, event)
    if event.node is None:
        _command_ended(state, job, event.code, event.said, now)
        return
    command.end_on(event.node, event.code, event.said)
    if nodes <= set(command.ended_on):
        _command_ended(state, job, command.first_code, command.said, now)
    elif event.code and not was_told:
        command.end_for(Purpose.ABORT)
        reason = f"its command has failed on node {listed((event.node,))}"
        state.order(Kill(job.id, reason, job.attempt, Purpose.ABORT))


def _command_ended(state: State, job: Gang, code: int, said: str, now: float) -> None:
    """Act on the end of the command of ``job``, which has ended with exit code ``code`` on all nodes."""
    job.command.end(code, said)
    if job.state.ended or job.relocating:
        close_if_gone(state, job, now)
    elif job.state is JobState.RELAUNCHING:
        restarts.relaunch_if_gone(state, job, now)
    elif code == 0:
        end(state, job, Trigger.SUCCEED, "", now)
    else:
        end(state, job, Trigger.FAIL, f"it ended with exit code {code}", now)
