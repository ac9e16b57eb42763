"""Start the processes of jobs: on which nodes, and anew on other nodes.

A process stays on its node. A job that is to be on another node is parked first. Then its processes are ended
and others are started there, which go on from its snapshot if there is one. In the policy's plan the job has
its devices all the while.
"""

from __future__ import annotations

from itertools import cycle, islice

from gpuslice.sched_core.jobs.command import Purpose, Stage
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import Trigger

from . import ahead
from .events import Bring, FindPort, Kill, Launch, Notice, Plain
from .node_map import listed
from .state import State


def launch(state: State, job: Gang, now: float) -> None:
    """Start the command of ``job`` on nodes that are chosen now, with all that it needs before."""
    nodes = _choose(state, job)
    if not nodes:
        state.reconcile_later(job)  # until a node that it may be on answers again
        return
    job.command.prepare(now)
    job.nodes = nodes
    state.nodes.confine(job)
    if state.nodes.origin(job):
        job.command.go_on(Stage.BRINGING)
        state.order(bring(state, job))
        ahead.start_at_goal(state, job)
    else:
        meet(state, job)


def bring(state: State, job: Gang) -> Bring:
    """Return the order to bring the state of ``job`` to its nodes.

    A node that is not waited for any more is no source: any other that has a state will do.
    """
    origin, without = state.nodes.origin(job), state.nodes.named(job.relocation.without)
    targets = state.nodes.named(job.nodes)[: len(origin)]
    sources = tuple(
        target if source in without else source for source, target in zip(origin, targets, strict=True)
    )
    return Bring(job.id, job.attempt, sources, targets)


def meet(state: State, job: Gang) -> None:
    """Find the port at which the ranks of ``job`` meet, if they are on several nodes, else start it."""
    names = state.nodes.named(job.nodes)
    if len(set(names)) > 1:
        job.command.go_on(Stage.MEETING)
        state.order(FindPort(job.id, job.attempt, names[0]))
    else:
        start(state, job)


def start(state: State, job: Gang) -> None:
    """Order the shell to start the command of ``job``: it needs nothing more."""
    ahead.take(state, job)
    job.command.go_on(Stage.STARTED)
    nodes = () if state.nodes.own_only else state.nodes.named(job.nodes)
    state.order(Launch(job.id, job.program, job.attempt, nodes, job.command.port))


def relocate(state: State, job: Gang, now: float) -> None:
    """End the processes of ``job``, which is parked, so that others can be started at its devices."""
    nodes = state.nodes
    if job.relocating or not nodes.can_leave(job):
        return
    goals = nodes.of(job.wanted) or nodes.state_nodes(job)
    there = ", ".join(nodes.named(tuple(sorted(set(goals)))))
    job.history.append((now, f"to be started on {there or 'this node'}"))
    leave(state, job, "it goes to another node", now)


def leave(state: State, job: Gang, reason: str, now: float) -> None:
    """End the processes of ``job`` for ``reason``, so that others can be started on nodes that are there."""
    job.relocation.leave_node(now, loses_time=bool(job.state_nodes))
    job.command.end_for(Purpose.RELOCATE)
    state.order(Kill(job.id, reason, job.attempt, Purpose.RELOCATE))


def go_back(state: State, job: Gang, reason: str, now: float) -> bool:
    """End what ``job`` has on other nodes, where its state cannot be, to start it where the state is.

    Return False if that is impossible: the state is on a silent node, or the job was to stay there before.
    """
    nodes = state.nodes
    if not job.state_nodes or nodes.any_silent(job.state_nodes) or job.told_to_end or job.relocation.stays:
        return False
    there, home = listed(nodes.named(job.nodes)), listed(nodes.named(nodes.state_nodes(job)))
    job.relocation.insist(insisted=False)
    job.relocation.stay()
    job.relocation.refuse(f"not moved to {there}: {reason}")
    job.history.append((now, f"not moved to {there}, to be started again on {home}: {reason}"))
    state.order(Notice("not_moved", job.id, {"to": there, "again": False, "reason": reason}))
    leave(state, job, f"it goes back to {home}", now)
    return True


def go_on(state: State, job: Gang, now: float) -> None:
    """Start ``job``, which has no process left on its former nodes, on its new nodes."""
    former = job.nodes
    job.relocation.carry(state.switch_costs.state_bytes(job))
    if job.lease:  # its node is lost, so nobody has told it to park
        job.stand_still()
        state.leave(job, Trigger.EMPTY, now)
    job.begin_elsewhere(now)
    state.switch_costs.forget(job)
    if job.keep:
        note_kept(state, job)
        state.reconcile_later(job)
        return
    launch(state, job, now)
    details: dict[str, Plain] = {
        "from": listed(state.nodes.named(former)),
        "to": listed(state.nodes.named(job.nodes)),
        "bytes": job.relocation.state_bytes,
    }
    state.order(Notice("relocated", job.id, details))
    state.reconcile_later(job)


def note_kept(state: State, job: Gang) -> None:
    """Note that no process of ``job`` is left. The time until it trains again is no cost of a move."""
    job.relocation.arrived()
    state.order(Notice("kept", job.id, {"steps": job.steps_so_far, "bytes": job.relocation.state_bytes}))


def arrived(state: State, job: Gang, now: float) -> None:
    """Note that ``job`` trains. If it was restarted, send a notice of how long it stood still."""
    job.relocation.trained()
    left_s, gone_s = job.relocation.left_s, job.relocation.gone_s
    first_hello_s = job.processes.first_hello_s
    if left_s is None or gone_s is None or first_hello_s is None:
        return
    blackout_s = now - left_s
    details: dict[str, Plain] = {
        "blackout_s": blackout_s,
        "ending_s": gone_s - left_s,
        "bringing_s": first_hello_s - gone_s,
        "setup_s": now - first_hello_s,
    }
    job.relocation.arrived()
    if not job.spec.relaunch:
        state.switch_costs.relocations.relocated(job, blackout_s)
    state.order(Notice("arrived", job.id, details))


def _choose(state: State, job: Gang) -> tuple[int, ...]:
    """Return the node to start each rank of ``job`` on.

    These are the nodes of its devices if it is to have some, else those of its state, else those with the
    least load, or none if no node answers. Those of its state come first if that cannot be brought.
    """
    nodes = state.nodes
    if nodes.single:
        return (0,) * len(job.ranks)
    home = job.state_nodes and not nodes.any_silent(job.state_nodes)
    home = home and job.command.not_for.keys().isdisjoint(job.state_nodes)
    if job.wanted and not (home and job.relocation.stays):
        wanted = nodes.of(job.wanted)
        return wanted[:1] * len(job.ranks) if job.spec.elastic else wanted
    if home:
        return nodes.state_nodes(job)
    return _least_loaded(state, job)


def _least_loaded(state: State, job: Gang) -> tuple[int, ...]:
    """Return the node to start each rank of ``job`` on, so that loads stay even."""
    load = [0] * len(state.nodes.numbers)
    for other in state.jobs.values():
        if other is not job and not other.processes_gone:
            for node in other.nodes:
                load[node] += 1
    sizes = state.nodes.cluster.node_sizes
    fitting = state.nodes.fitting(job)
    if not any(sizes[node] for node in fitting):
        return ()  # none of them answers
    nodes = sorted(
        (node for node in fitting if sizes[node]),
        key=lambda n: (sizes[n] < len(job.ranks), load[n] / sizes[n], n),
    )
    if job.spec.elastic or job.within:
        return tuple(nodes[:1]) * len(job.ranks)
    if state.nodes.spread:
        slots = [node for number in range(max(sizes)) for node in nodes if number < sizes[node]]
    else:
        slots = [node for node in nodes for _ in range(sizes[node])]
    # Ranks in excess of the devices wait on these nodes, and move when a node is found.
    return tuple(sorted(islice(cycle(slots), len(job.ranks))))
