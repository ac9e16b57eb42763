"""The start of a job's command on its nodes, in the order of ``facts.Stage``, and its end there.

If the state of the job is on other nodes, it is brought first. If the command has a part on each of several
nodes, a port is found at which its ranks meet. Then the shell is ordered to start it. Each answer of the
shell is an event that names the attempt. So another scheduler knows from the journal what is still to be
ordered, and nothing is started twice.
"""

from __future__ import annotations

import signal

from gpuslice.sched_core.jobs.facts import Stage
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.types import shortened

from .contract import CoreContract
from .events import Bring, Brought, Exited, FindPort, Kill, Launch, PortFound, StateWaits

#: The exit code of a command that was never started, or whose node is lost.
KILLED = -signal.SIGKILL
_SAID_CHARACTERS = 4096


def launch(core: CoreContract, job: Gang, now: float) -> None:
    """Start the command of ``job`` on nodes that are chosen now, with all that it needs before."""
    job.command.prepare(now)
    core.relocations.place(job)
    if core.relocations.origin(job):
        job.command.go_on(Stage.BRINGING)
        core.order(bring(core, job))
    else:
        _meet(core, job)


def bring(core: CoreContract, job: Gang) -> Bring:
    """Return the order to bring the state of ``job`` to its nodes."""
    sources = core.relocations.origin(job)
    return Bring(job.id, job.attempt, sources, core.relocations.named(job.nodes)[: len(sources)])


def take(core: CoreContract, job: Gang, event: Brought | StateWaits | PortFound, now: float) -> None:
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
            core.relocations.mark_state_unreachable(job)
        case Brought(error=error) if error:
            core.command_ended(job, KILLED, not_brought(bring(core, job).targets, error), now)
        case _ if job.told_to_end:
            core.command_ended(job, KILLED, "", now)
        case Brought():
            _meet(core, job)
        case PortFound():
            job.command.meet_at(event.port)
            _start(core, job)


def not_brought(nodes: tuple[str, ...], error: str) -> str:
    """Return the sentence that the state of a job could not be brought to ``nodes``, with ``error``."""
    return shortened(
        f"gpuslice: its state could not be brought to {listed(nodes)}: {error}", _SAID_CHARACTERS
    )


def listed(names: tuple[str, ...]) -> str:
    """Return ``names``, of nodes, joined by commas, each once. The scheduler's own node is ``here``."""
    return ",".join(name or "here" for name in dict.fromkeys(names))


def exited(core: CoreContract, job: Gang, event: Exited, now: float) -> None:
    """Note that the command of ``job`` has ended, or its part on one of several nodes.

    The command has ended when all of its parts have, as the first part that failed. The others are told to
    end.

    Raises
    ------
    IllegalTransitionError
        If that has ended before; nothing was changed.
    """
    command, nodes = job.command, set(core.relocations.named(job.nodes))
    if not command.runs or event.node in command.ended_on or event.node not in {None, *nodes}:
        raise job.illegal(f"second exit with code {event.code}")
    if event.node is None:
        core.command_ended(job, event.code, event.said, now)
        return
    was_told = job.told_to_end
    command.end_on(event.node, event.code, event.said)
    if nodes <= set(command.ended_on):
        core.command_ended(job, command.first_code, command.said, now)
    elif event.code and not was_told:
        core.order(Kill(job.id, f"its command has failed on node {listed((event.node,))}"))


def _meet(core: CoreContract, job: Gang) -> None:
    """Find the port at which the ranks of ``job`` meet, if they are on several nodes, else start it."""
    names = core.relocations.named(job.nodes)
    if len(set(names)) > 1:
        job.command.go_on(Stage.MEETING)
        core.order(FindPort(job.id, job.attempt, names[0]))
    else:
        _start(core, job)


def _start(core: CoreContract, job: Gang) -> None:
    """Order the shell to start the command of ``job``: it needs nothing more."""
    job.command.go_on(Stage.STARTED)
    names = core.relocations.named(job.nodes)
    nodes = names if core.relocations.several_nodes else ()
    core.order(Launch(job.id, job.program, job.attempt, nodes, job.command.port))
