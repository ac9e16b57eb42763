"""Nodes that do not answer: what jobs lose by that, how long they wait, and how they go on.

Silence is a fact of a node, and waiting is what its jobs do. A silent node gets nothing new. What was started
there and was never given devices is taken back, and started elsewhere: it has no state, and without an order
of the scheduler it begins no training.

A job that was given devices keeps them. Until the lease of its node has run out its processes may go on.
After that it waits, for as long as its owner allows, for the node to be found. Then its processes go on if
they are alive, or its next attempt goes on from its state. Else it goes on without the node: from a state
that another node has, or from the beginning. No restart is spent on any of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import IN_TRANSIT
from gpuslice.sched_core.lifecycle import unfit_nodes
from gpuslice.sched_core.lifecycle.events import NodeFound, NodeLost, NodeSilent, Notice
from gpuslice.sched_core.lifecycle.launches import leave
from gpuslice.sched_core.lifecycle.node_map import listed
from gpuslice.sched_core.lifecycle.state import State
from gpuslice.wire import FromAgent, Hello


class Absences:
    """The part of ``Core`` that acts on the silence of nodes.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def take(self, event: NodeSilent | NodeLost | NodeFound, now: float) -> list[Gang]:
        """Act on ``event``. Return the jobs whose nodes answer again.

        Raises
        ------
        UsageError
            If there is no such node.
        """
        match event:
            case NodeSilent():
                self._state.nodes.fall_silent(event.node, now)
            case NodeLost():
                self._state.nodes.lose(event.node, now)
            case NodeFound():
                return self._find(event, now)
        for job in self._living():
            if self._state.nodes.cut_off(job):
                self._cut_off(job, now)
        return []

    def heard(self, job: Gang, message: FromAgent) -> None:
        """Note that a rank of ``job`` has sent ``message``. A Hello says that its process is alive."""
        if isinstance(message, Hello) and not job.processes.cut_off:
            job.processes.heard()

    def expire(self, now: float) -> None:
        """Let jobs go on without nodes that they have waited for as long as their owners allow."""
        for job in self._waiting():
            if self._until_s(job) <= now:
                self._go_without(job, now)

    def due_s(self) -> float:
        """Return when a job is to go on without its node; infinite if none waits, or a lease runs still."""
        return min(map(self._until_s, self._waiting()), default=inf)

    def _living(self) -> list[Gang]:
        return [job for job in self._state.jobs.values() if not job.state.ended]

    def _waiting(self) -> Iterator[Gang]:
        """Yield the jobs that may need a silent node, and have not been told to end."""
        nodes = self._state.nodes
        if nodes.silent:
            for job in self._state.jobs.values():
                places = job.nodes + job.state_nodes
                if places and nodes.any_silent(places) and not job.told_to_end:
                    yield job

    def _until_s(self, job: Gang) -> float:
        """Return until when ``job`` waits. Infinite while its processes may go on where nobody hears them."""
        nodes = self._state.nodes
        runs = job.processes.cut_off and not nodes.all_lost(nodes.awaited(job))
        return inf if runs else nodes.waits_until_s(job)

    def _cut_off(self, job: Gang, now: float) -> None:
        """Take ``job`` back if it has not begun, else note that its node does not answer."""
        state, nodes = self._state, self._state.nodes
        away = [node for node in job.nodes if nodes.any_silent((node,))]
        if not job.told_to_end and self._is_to_be_taken_back(job, now):
            names = listed(nodes.named(away))
            job.history.append((now, f"taken back from {names}"))
            state.order(Notice("taken_back", job.id, {"node": names}))
            leave(state, job, f"node {names} does not answer", now)
        job.processes.lose_node(stopped=nodes.all_lost(away))
        job.book(now)
        state.reconcile_later(job)

    def _is_to_be_taken_back(self, job: Gang, now: float) -> bool:
        """Return True if nothing of this attempt of ``job`` can have begun, and its state is elsewhere."""
        if not job.command.runs or job.processes.placed:
            return False
        if job.state_nodes:
            return job.spec.relaunch or not self._state.nodes.any_silent(job.state_nodes)
        return not job.may_have_begun(now)

    def _find(self, event: NodeFound, now: float) -> list[Gang]:
        """Note that a node answers again. Return the jobs that had processes there and are whole now."""
        nodes = self._state.nodes
        number = nodes.find(event.node)
        unfit_nodes.forget(self._state, event.node)
        returned = []
        for job in self._living():
            waited = number in job.nodes or number in job.state_nodes
            job.relocation.wait_again(number)
            if job.processes.cut_off and not nodes.cut_off(job):
                job.processes.find_node()
                if job.state in IN_TRANSIT:
                    job.lateness.told(now)  # it has as much time again
                job.book(now)
                returned.append(job)
            if number in job.nodes and event.anew and not job.processes_gone:
                job.processes.rejoin()
            if waited or not job.command.launched:
                self._state.reconcile_later(job)
        return returned

    def _go_without(self, job: Gang, now: float) -> None:
        """Start ``job`` without the nodes that it waits for."""
        state, nodes = self._state, self._state.nodes
        away = nodes.awaited(job)
        names, waited_s = listed(nodes.named(away)), now - min(nodes.silent_since_s[node] for node in away)
        job.relocation.go_without(away)
        job.history.append((now, f"goes on without {names}"))
        state.order(Notice("went_without", job.id, {"node": names, "waited_s": waited_s}))
        if job.command.runs:
            leave(state, job, f"node {names} does not answer", now)
        state.reconcile_later(job)
