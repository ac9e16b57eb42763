"""The processes of each job on its nodes: one command a node, started, sought and ended together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.core.events import Event, Exited, Launch, NodeFound, NodeLost, Noted, RankGone
from gpuslice.sched_core.core.relocation import listed
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.places import processes_of
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.nodes import exit_record
from gpuslice.sched_core.nodes.gang_commands import GangEnds, on_node
from gpuslice.sched_core.nodes.lease import LEASED
from gpuslice.sched_core.nodes.local_node import LocalNode
from gpuslice.sched_core.nodes.node import Connection, Node, Reports, Sought
from gpuslice.sched_core.nodes.remote_nodes import RemoteNode, RemoteNodes
from gpuslice.sched_core.nodes.transfers import Transfers
from gpuslice.types import shortened

_SAID_CHARACTERS = 4096


class JobProcesses:
    """The processes of all jobs: orders of the core are carried out, and their ends become events.

    Parameters
    ----------
    core
        Knows where each job is.
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
        self._ends = GangEnds()
        self._transfers: Transfers | None = None
        #: The nodes on which jobs are started when their state has arrived, by job and attempt.
        self._awaited: dict[tuple[str, int], list[str]] = {}
        #: The jobs and attempts whose state cannot be brought now.
        self._waiting: set[tuple[str, int]] = set()
        #: The nodes on which jobs are started when it is known where their ranks meet, by job and attempt.
        self._meeting: dict[tuple[str, int], list[str]] = {}
        #: The commands, by job, attempt and node, whose end was reported because their node was lost.
        self._given_up: set[tuple[str, int, str]] = set()

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
            remote.changed = self._node_changed

    def launch(self, command: Launch) -> None:
        """Start the command of a job on each of its nodes."""
        names = dict.fromkeys(command.nodes or ("",))
        self._ends.begin(command.job, names)
        for name in names:
            self._start(name, self._core.jobs[command.job])

    def end(self, job: str, *, at_once: bool = False) -> None:
        """End every process of ``job``, within its grace time. If ``at_once``, kill them unasked."""
        found = self._core.jobs[job]
        self._end_on(dict.fromkeys(self._nodes_of(found)), job, 0.0 if at_once else found.spec.grace_s)

    def _end_on(self, nodes: Iterable[str], job: str, grace_s: float) -> None:
        """End the processes of ``job`` on ``nodes``, and cancel those that were to be started."""
        if self._transfers is not None:
            self._transfers.cancel(job)
        for name in nodes:
            self._node(name).end(job, grace_s=grace_s)
        for attempt in [attempt for attempt in self._meeting if attempt[0] == job]:
            for name in self._meeting.pop(attempt):
                self.ended(name, Exited(job, exit_record.KILLED))

    def find(self, job: Gang, *, only: str | None = None) -> None:
        """Look for the processes of ``job``, started before, on its nodes, or on one of them ``only``."""
        names = self._nodes_of(job)
        if only is None:
            self._ends.begin(job.id, names)
        for name in dict.fromkeys(names) if only is None else (only,):
            known = ((rank, pid) for rank in range(len(job.ranks)) for pid in processes_of(job, rank))
            there = tuple((rank, pid) for rank, pid in known if names[rank] == name)
            given_up = (job.id, job.attempt, name) in self._given_up
            sought = Sought(
                job.id,
                job.attempt,
                job.command.exit_code is not None or name not in self._ends.others(job.id),
                self._over(job),
                there,
                # After its grace time it could greet as a rank of the next attempt.
                grace_s=0.0 if given_up else _grace_s(job),
                copied=self._remote.copied(job.id, name) if self._remote and name else (0, 0),
            )
            if name in self._core.relocations.lost:
                self._give_up(sought, name)
            else:
                self._start_later(name, job)
                self._node(name).find(sought)

    def send(self, connection: Connection, frame: bytes) -> None:
        """Send ``frame`` to the rank at ``connection``."""
        self._node(connection.node).send(connection.identity, frame)

    def greeted(self, job: str, rank: int, pid: int, connection: Connection) -> None:
        """Watch a rank, process ``pid``, which has said who it is. End it if its job has ended."""
        node = self._node(connection.node)
        node.watch_rank(job, rank, pid, connection.identity)
        found = self._core.jobs[job]
        if found.state.ended:
            node.end(job, grace_s=found.spec.grace_s)  # its end was before it could be told

    def ended(self, node: str, event: Exited | RankGone) -> None:
        """Handle the end of a command or a rank. A job's command ends when it has on all of its nodes."""
        if isinstance(event, RankGone):
            self._occur(event)
        elif (end := self._ends.note(node, event)) is not None:
            self._occur(end)
        elif self._ends.failed(event.job):
            grace_s = self._core.jobs[event.job].spec.grace_s
            self._end_on(self._ends.others(event.job), event.job, grace_s)

    def missing(self, node: str, name: str) -> None:
        """Start a job's command on ``node``, where it never started. If the job is to end, report its end."""
        job = self._core.jobs[name]
        if self._over(job):
            self.ended(node, Exited(job.id, exit_record.KILLED))  # given up before it was started
        else:
            self._start(node, job)

    def _start(self, node: str, job: Gang) -> None:
        """Start the command of ``job`` on one of its nodes, once the job's state is where it is to be."""
        origin = self._core.relocations.origin(job)
        if self._transfers is None or not origin:
            self._launch_on([node], job)
            return
        attempt = (job.id, job.attempt)
        if attempt in self._awaited:
            self._awaited[attempt].append(node)
            return
        self._awaited[attempt] = [node]
        targets = self._nodes_of(job)[: len(origin)]
        arrived = partial(self._arrived, *attempt, listed(targets))
        waiting = partial(self._waits, *attempt, listed(targets))
        self._transfers.begin(job.id, origin, targets, arrived, waiting)

    def _start_later(self, node: str, job: Gang) -> None:
        """Start the command of ``job`` on ``node`` only when that says that it is missing: never twice."""
        for pending in (self._awaited, self._meeting):
            if node in (nodes := pending.get((job.id, job.attempt), [])):
                nodes.remove(node)

    def _waits(self, name: str, attempt: int, there: str, said: str) -> None:
        """Report, once, that the state of a job cannot be brought now."""
        if (name, attempt) not in self._waiting:
            self._waiting.add((name, attempt))
            details = {"to": there, "reason": shortened(said, _SAID_CHARACTERS)}
            self._occur(Noted("state_waits", name, details))

    def _arrived(self, name: str, attempt: int, there: str, error: str) -> None:
        """Start a job whose state has arrived. If ``error`` says why it has not, report its commands' end."""
        nodes = self._awaited.pop((name, attempt), [])  # none: one of them was lost meanwhile
        self._waiting.discard((name, attempt))
        job = self._core.jobs[name]
        if not error and not self._over(job):
            self._launch_on(nodes, job)
        elif nodes:
            said = shortened(
                f"gpuslice: its state could not be brought to {there}: {error}", _SAID_CHARACTERS
            )
            with suppress(OSError), self._local.processes.log(name, "err").open("a") as log:
                log.write(f"{said}\n")
            for node in nodes:
                self.ended(node, Exited(name, exit_record.KILLED, said))

    def _launch_on(self, nodes: Sequence[str], job: Gang) -> None:
        """Start the command of ``job`` on some of its nodes, once it is known where its ranks meet."""
        first, *others = dict.fromkeys(self._nodes_of(job))
        if not nodes:
            return  # they are asked whether they have started it, and start it if they have not
        if not others:
            self._launch(first, job, job.program)
        else:
            self._meeting.setdefault((job.id, job.attempt), []).extend(nodes)
            self._node(first).find_port(job.id, job.attempt)

    def port_found(self, name: str, attempt: int, port: int) -> None:
        """Start the commands of a job whose ranks are to meet at ``port`` of the first rank's node."""
        for node in self._meeting.pop((name, attempt), []):
            job = self._core.jobs[name]
            nodes = self._nodes_of(job)
            assert self._remote is not None
            host = self._remote.addresses[nodes[0]]
            self._launch(node, job, on_node(job.program, nodes, node, host=host, port=port))

    def _launch(self, node: str, job: Gang, program: Program) -> None:
        """Start ``program``, the command of ``job``, on ``node``."""
        environ = dict(self._environ(job.spec, len(job.ranks), job.program))
        if node and job.spec.max_restarts:
            environ[LEASED] = "1"  # if the node is lost, it is started elsewhere
        self._node(node).launch(job.id, program, environ, job.attempt)

    def _give_up(self, sought: Sought, node: str) -> None:
        """Report the end of what was ``sought`` on ``node``, which is lost."""
        attempt = (sought.job, sought.attempt)
        self._given_up.add((*attempt, node))
        over = self._awaited.pop(attempt, [])
        if over and self._transfers is not None:
            self._waiting.discard(attempt)
            self._transfers.cancel(sought.job)
        for rank, pid in sought.ranks:
            self._occur(RankGone(sought.job, rank, pid=pid))
        if not sought.exited and node not in over:
            over.append(node)
        for name in over:
            self.ended(name, Exited(sought.job, exit_record.KILLED, f"gpuslice: node {node} was lost"))

    def _node_changed(self, node: RemoteNode) -> None:
        """Act on a node whose agent has joined, or which counts as lost: look for its processes."""
        ours = [job for job in self._core.jobs.values() if not job.processes_gone]
        ours = [job for job in ours if node.name in self._nodes_of(job)]
        if node.joined:
            self._disconnected(node.name)
            # While nothing was heard of them they may have been started elsewhere.
            for name in set(node.running) - {job.id for job in ours}:
                node.end(name, grace_s=0.0)
        if node.name in self._core.relocations.lost:
            if node.joined:
                self._occur(NodeFound(node.name))
        elif not node.joined:
            self._occur(NodeLost(node.name))
        for job in ours:
            self.find(job, only=node.name)
        if node.joined:  # what it was asked before is lost
            for name, attempt in self._meeting:
                if self._nodes_of(self._core.jobs[name])[0] == node.name:
                    node.find_port(name, attempt)

    def _over(self, job: Gang) -> bool:
        """Return True if the processes of ``job`` are to end, for good or so that it can be started anew."""
        ends = job.state.ended or job.relocation.ending or job.state is JobState.RELAUNCHING
        return ends or self._ends.failed(job.id)

    def _nodes_of(self, job: Gang) -> tuple[str, ...]:
        """Return the node of each rank of ``job``."""
        return self._core.relocations.named(job.nodes)

    def _node(self, name: str) -> Node:
        return self._remote.nodes[name] if name and self._remote is not None else self._local


def _grace_s(job: Gang) -> float:
    """Return how long processes of ``job``, which another scheduler told to end, may still take to end."""
    return 0.0 if job.relocation.ending else job.spec.grace_s
