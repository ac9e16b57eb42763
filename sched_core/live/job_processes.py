"""The processes of each job on its nodes: the core's orders are carried out, and their results become events.

Nothing is kept here from one call to the next. What is to be brought or started, where, and what has ended
are facts of the core (``jobs/command.Command``), which another scheduler has from the journal. Each order is
compared with them before it is carried out: what happened meanwhile may have made it void.

What is under way has a handle elsewhere: transfers in ``nodes/transfers``, processes and their ports in
``nodes/local_node``. ``find_all`` makes them anew for another scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import msgspec

from gpuslice.config import BEGIN_ANEW
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.command import Stage
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.places import processes_of
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle import launching
from gpuslice.sched_core.lifecycle.events import (
    Bring,
    Brought,
    Event,
    Exited,
    FindPort,
    GiveUpAhead,
    Kill,
    Launch,
    NodeFound,
    NodeLost,
    NodeSilent,
    PortFound,
    RankGone,
    StartAhead,
    StateWaits,
    WaitsAhead,
)
from gpuslice.sched_core.lifecycle.launches import bring
from gpuslice.sched_core.lifecycle.launching import KILLED
from gpuslice.sched_core.lifecycle.node_map import listed
from gpuslice.sched_core.nodes.lease import LEASED
from gpuslice.sched_core.nodes.local_node import LocalNode
from gpuslice.sched_core.nodes.node import Connection, Node, Reports, Sought
from gpuslice.sched_core.nodes.remote_nodes import RemoteNode, RemoteNodes
from gpuslice.sched_core.nodes.rendezvous import on_node
from gpuslice.sched_core.nodes.transfers import Transfers
from gpuslice.types import MAX_COUNT, shortened

_SAID_CHARACTERS = 4096


class JobProcesses:
    """The processes of all jobs: orders of the core are carried out, and their results become events.

    Parameters
    ----------
    core
        Knows where each job is, and how far its command has come; only read.
    occur
        Called with each event.
    environ
        Returns the variables that a job of so many ranks gets over its own environment.
    """

    def __init__(
        self,
        core: Core,
        occur: Callable[[Event], object],
        environ: Callable[[JobSpec, int, Program], Mapping[str, str]],
    ) -> None:
        self._core = core
        self._occur = occur
        self._environ = environ
        self._transfers: Transfers | None = None

    def begin(
        self,
        local: LocalNode,
        remote: RemoteNodes | None,
        reports: Reports,
        disconnected: Callable[[str], object],
    ) -> None:
        """Set the nodes where jobs can be: this one, and perhaps others.

        ``disconnected`` is called with a node on which all connections of ranks are over.
        """
        self._local = local
        self._remote = remote
        self._disconnected = disconnected
        if remote is not None:
            self._transfers = remote.transfers
            remote.begin(reports, local.processes.log)
            remote.changed, remote.answers = self._node_changed, self._node_answers

    # The core's orders.

    def perform(self, command: Bring | FindPort | StartAhead | GiveUpAhead | Launch | Kill) -> None:
        """Carry out ``command``, if it is not void by now."""
        job = self._core.jobs[command.job]
        match command:
            case Kill():
                if command.attempt == job.attempt:  # else it has ended, and another was begun
                    self._end(job, 0.0 if command.at_once else job.spec.grace_s)
            case Bring() if _waits_for(job, command.attempt, Stage.BRINGING):
                self._bring(command)
            case FindPort() if _waits_for(job, command.attempt, Stage.MEETING):
                self._node(command.node).find_port(command.job, command.attempt)
            case StartAhead() if job.relocation.ahead is not None:
                self._start_ahead(job, command)
            case GiveUpAhead():
                self._node(command.node).give_up_ahead(command.job)
            case Launch():
                for node in dict.fromkeys(command.nodes or ("",)):
                    if _waits_for(job, command.attempt, Stage.STARTED):  # not void by what became of the last
                        self._start(node, job)

    def _bring(self, command: Bring) -> None:
        """Bring the state of a job to its nodes. Without a way to do so it starts there without its state."""
        job, attempt = command.job, command.attempt
        if self._transfers is None:
            self._occur(Brought(job, attempt))
            return
        there = listed(command.targets)
        brought, waits = partial(self._brought, command), partial(self._waits, job, attempt, there)
        gone = partial(self._brought, command, gone=True)
        self._transfers.begin(job, command.sources, command.targets, brought, waits, gone)

    def _waits(self, name: str, attempt: int, there: str, said: str) -> None:
        """Report, once, that the state of a job cannot be brought now."""
        job = self._core.jobs[name]
        if _waits_for(job, attempt, Stage.BRINGING) and not job.command.unreachable:
            self._occur(StateWaits(name, attempt, there, shortened(said, _SAID_CHARACTERS)))

    def _brought(self, command: Bring, error: str, *, gone: bool = False) -> None:
        """Report that a state has arrived, or why not. Nobody waits for a transfer that was cancelled."""
        if not _waits_for(self._core.jobs[command.job], command.attempt, Stage.BRINGING):
            return
        error = shortened(error, _SAID_CHARACTERS)
        if error:
            with suppress(OSError), self._local.processes.log(command.job, "err").open("a") as log:
                log.write(f"{launching.not_brought(command.targets, error)}\n")
        self._occur(Brought(command.job, command.attempt, error, gone))

    def _start(self, node: str, job: Gang) -> None:
        """Start the command of ``job`` on ``node``. If the job is to end by now, report its end there."""
        if job.told_to_end:
            self.ended(node, Exited(job.id, KILLED, attempt=job.attempt))
            return
        program, environ = job.program, self._variables(job, node)
        nodes = self._nodes_of(job)
        if len(set(nodes)) > 1:
            assert self._remote is not None
            host = self._remote.addresses[nodes[0]]
            program = on_node(program, nodes, node, host=host, port=job.command.port)
        if job.command.anew:
            environ[BEGIN_ANEW] = "1"
        self._node(node).launch(job.id, program, environ, job.attempt)

    def _start_ahead(self, job: Gang, command: StartAhead) -> None:
        """Start the process of ``job`` before its turn."""
        environ = self._variables(job, command.node)
        self._node(command.node).start_ahead(job.id, job.program, environ, command.attempt)
        if self._remote is not None and command.attempt > job.attempt:  # its state is brought later
            self._remote.stand_by({command.node, *self._nodes_of(job)})

    def _variables(self, job: Gang, node: str) -> dict[str, str]:
        """Return the variables that the command of ``job`` gets on ``node`` over its own."""
        environ = dict(self._environ(job.spec, len(job.ranks), job.program))
        return {**environ, LEASED: "1"} if node else environ  # if the node is lost, it may start elsewhere

    def _end(self, job: Gang, grace_s: float) -> None:
        """End every process of ``job``, and cancel what its command still waits for."""
        if self._transfers is not None:
            self._transfers.cancel(job.id)
        if job.command.stage in _BEFORE_START:
            self._occur(Exited(job.id, KILLED, attempt=job.attempt))
            return
        nodes = tuple(dict.fromkeys(self._nodes_of(job)))
        for name in nodes:
            self._node(name).end(job.id, job.attempt, grace_s=grace_s)
        self._give_up_silent(job, nodes)

    # What another scheduler, or an agent that was away, has to be asked.

    def find_all(self) -> None:
        """Look for the processes of all jobs, which another scheduler has started, and go on from there."""
        # Listed before the first of them: what became of one may have others started.
        for job, attempt in [(job, job.attempt) for job in self._core.jobs.values()]:
            if not job.processes_gone and job.attempt == attempt:
                self._find(job, tuple(dict.fromkeys(self._nodes_of(job))))
                if _waits_for(job, attempt, Stage.BRINGING):
                    self._bring(bring(self._core.state, job))

    def _find(self, job: Gang, nodes: tuple[str, ...]) -> None:
        """Look for what the present attempt of ``job`` has on ``nodes``, and go on from there."""
        attempt = job.attempt
        for node in nodes:
            if job.attempt != attempt or job.processes_gone:
                return  # that was the last of it
            if job.command.stage in _BEFORE_START:
                self._go_on(job, node)
            elif node in self._core.state.nodes.silent:
                self._give_up_silent(job, (node,))
            else:
                self._node(node).find(self._sought(job, node))

    def _go_on(self, job: Gang, node: str) -> None:
        """Ask ``node`` for the port that ``job`` waits for. End the command if it is not to be started."""
        lost = f"gpuslice: node {node} was lost" if node in self._core.state.nodes.lost else ""
        if job.told_to_end:
            if self._transfers is not None:
                self._transfers.cancel(job.id)
            self._occur(Exited(job.id, KILLED, lost, attempt=job.attempt))
        elif job.command.stage is Stage.MEETING and node == self._nodes_of(job)[0]:
            self._node(node).find_port(job.id, job.attempt)

    def _sought(self, job: Gang, node: str) -> Sought:
        """Return what ``node`` is asked about ``job``."""
        # Where its command has ended, as on a node that was lost and is found, the rest is killed unasked:
        # after its grace time it could greet as a rank of the next attempt.
        over = node in job.command.ended_on
        return Sought(
            job.id,
            job.attempt,
            over or not job.command.runs,
            job.told_to_end,
            self._ranks_on(job, node),
            grace_s=0.0 if over else _grace_s(job),
            copied=self._remote.copied(job.id, node) if self._remote and node else (0, 0),
        )

    def _give_up_silent(self, job: Gang, nodes: tuple[str, ...]) -> None:
        """Report the end of ``job``, which is told to end, on those of ``nodes`` that cannot say so.

        A lost node has stopped its processes, and ends them before they could go on. A process that was never
        given devices does nothing on a node that is only silent.
        """
        known, attempt = self._core.state.nodes, job.attempt
        over = known.lost if job.processes.placed else known.silent
        for node in nodes:
            if job.told_to_end and job.attempt == attempt and node in over:
                self._give_up(job, node)

    def _give_up(self, job: Gang, node: str) -> None:
        """Report the end of what ``job`` has on ``node``, which does not answer."""
        attempt = job.attempt
        for rank, pid in self._ranks_on(job, node):
            self._occur(RankGone(job.id, rank, pid=pid, attempt=attempt))
        self.ended(node, Exited(job.id, KILLED, f"gpuslice: node {node} was lost", attempt=attempt))

    def _ranks_on(self, job: Gang, node: str) -> tuple[tuple[int, int], ...]:
        """Return rank and pid of each process that is a rank of ``job`` on ``node``, or waits to be."""
        ranks = (rank for rank, name in enumerate(self._nodes_of(job)) if name == node)
        return tuple((rank, pid) for rank in ranks for pid in processes_of(job, rank))

    def _node_changed(self, node: RemoteNode) -> None:
        """Act on a node whose agent has joined, or which is silent or lost: look for its processes."""
        ours = [job for job in self._core.jobs.values() if not job.processes_gone]
        ours = [job for job in ours if node.name in self._nodes_of(job)]
        attempts = [job.attempt for job in ours]
        if not node.silent:
            self._disconnected(node.name)
            # While nothing was heard of them they may have been started elsewhere.
            present = {job.id: job.attempt for job in ours}
            for name in sorted(set(node.running)):
                before = present.get(name, MAX_COUNT) - 1  # what is not ours has no present attempt there
                if before >= 0:
                    node.end(name, before, grace_s=0.0)
        self._tell_state(node, anew=bool(ours))
        for job, attempt in zip(ours, attempts, strict=True):
            if job.attempt == attempt:
                self._find(job, (node.name,))

    def _node_answers(self, node: RemoteNode) -> None:
        """Act on a node that was silent and answers again: nothing there has changed."""
        self._tell_state(node, anew=False)

    def _tell_state(self, node: RemoteNode, *, anew: bool) -> None:
        """Tell the core whether ``node`` answers, is silent or is lost, if that is news.

        ``anew`` is True if its agent has joined anew, and jobs have processes there, which have to greet.
        """
        assert self._remote is not None
        known, name = self._core.state.nodes, node.name
        if not node.silent and (anew or name in known.silent):
            self._occur(NodeFound(name, anew))
        elif name in self._remote.lost and name not in known.lost:
            self._occur(NodeLost(name))
        elif node.silent and name not in known.silent:
            self._occur(NodeSilent(name))

    # What the nodes report.

    def send(self, connection: Connection, frame: bytes) -> None:
        """Send ``frame`` to the rank at ``connection``."""
        self._node(connection.node).send(connection.identity, frame)

    def greeted(self, attempt: int | None, job: str, rank: int, pid: int, connection: Connection) -> None:
        """Watch a rank, process ``pid``, which has said who it is. End it if its attempt has ended."""
        node, found = self._node(connection.node), self._core.jobs[job]
        attempt = found.attempt if attempt is None else attempt
        node.watch_rank(job, attempt, rank, pid, connection.identity)
        if attempt < found.attempt:
            node.end(job, attempt, grace_s=0.0)  # another attempt has its place and its state
        elif found.state.ended:
            node.end(job, attempt, grace_s=found.spec.grace_s)  # its end was before it could be told

    def ended(self, node: str, event: Exited | RankGone) -> None:
        """Handle the end of a command or a rank on ``node``. The end of a command may be told twice."""
        if isinstance(event, Exited):
            job = self._core.jobs[event.job]
            nodes = self._nodes_of(job)
            if event.attempt not in (None, job.attempt):
                return  # of an attempt before
            if job.command.stage is not Stage.STARTED or node in job.command.ended_on or node not in nodes:
                return
            if len(set(nodes)) > 1:
                event = msgspec.structs.replace(event, node=node)
        self._occur(event)

    def missing(self, node: str, name: str, attempt: int) -> None:
        """Start a job's command on ``node``, where it never started."""
        if _waits_for(job := self._core.jobs[name], attempt, Stage.STARTED):
            self._start(node, job)

    def port_found(self, name: str, attempt: int, port: int) -> None:
        """Report the port at which the ranks of a job are to meet, if it still waits for that."""
        if _waits_for(self._core.jobs[name], attempt, Stage.MEETING):
            self._occur(PortFound(name, attempt, port))

    def waits_ahead(self, name: str, attempt: int) -> None:
        """Report that a process of a job that was started ahead waits, if the job trains until then."""
        relocation = self._core.jobs[name].relocation
        if relocation.trains_until_s and relocation.ahead is not None and relocation.ahead[1] == attempt:
            self._occur(WaitsAhead(name, attempt))

    def _nodes_of(self, job: Gang) -> tuple[str, ...]:
        """Return the node of each rank of ``job``."""
        return self._core.state.nodes.named(job.nodes)

    def _node(self, name: str) -> Node:
        return self._remote.nodes[name] if name and self._remote is not None else self._local


#: The stages in which a command has nothing on any node.
_BEFORE_START = (Stage.BRINGING, Stage.MEETING)


def _waits_for(job: Gang, attempt: int, stage: Stage) -> bool:
    """Return True if ``attempt`` is the present attempt of ``job``, and has come as far as ``stage``."""
    return job.attempt == attempt and job.command.stage is stage


def _grace_s(job: Gang) -> float:
    """Return how long processes of ``job``, which another scheduler told to end, may still take to end."""
    return 0.0 if job.command.no_grace else job.spec.grace_s
