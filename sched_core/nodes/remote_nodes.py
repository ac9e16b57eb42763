"""The scheduler's connections to its agents on other nodes: one TCP socket, protected by keys."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path

import zmq

from gpuslice.clock import Clock
from gpuslice.errors import GpusliceError, RemoteProtocolError
from gpuslice.sched_core.jobs.program import Program

from .curve import KeyAuthenticator, scheduler_keys
from .endpoint import bind_tcp
from .lease import SILENT_AFTER_S
from .log_copies import LogCopies
from .node import Connection, Reports, Sought
from .node_wire import (
    OPTIONS,
    VERSION,
    Beat,
    End,
    Ended,
    Find,
    FindPort,
    FromNode,
    FromRank,
    GiveUpAhead,
    Heard,
    Joined,
    Leave,
    Left,
    Missing,
    PortFound,
    Printed,
    Rejoin,
    Serve,
    StandBy,
    Start,
    StartAhead,
    Stored,
    ToNode,
    ToRank,
    WaitsAhead,
    WatchRank,
    decode_from_node,
    encode,
)
from .relay import MARK, Relay
from .transfers import Command, Transfers

#: A node counts as lost after this time without a message of its agent.
LOST_AFTER_S = 60.0
#: An agent may take so long to connect to a scheduler that has just begun.
_FIRST_WORD_S = 15.0
_MESSAGES_AT_ONCE = 200
#: Longest wait for an agent's answer that it leaves.
_DISMISS_S = 10.0
#: An agent that has not joined for so long will hardly do so by itself.
COME_S = 8.0
#: A node that does not fit is looked at again after so long.
_JUDGE_AGAIN_S = 10.0
_log = logging.getLogger(__name__)


class RemoteNode:
    """A node with an agent. Orders sent while no agent is connected are lost, and repeated when it joins.

    Attributes
    ----------
    joined
        True if its agent is connected, as far as is known.
    heard_s
        Time of its last message, or since when a scheduler listens.
    silent
        True if it has been silent for ``SILENT_AFTER_S``, or is lost.
    running
        The jobs that its agent has found when it joined.
    misfit
        Why the node cannot be used although its agent answers; empty if it can.
    came
        True if its agent has joined since a scheduler listens.
    """

    def __init__(self, name: str, send: Callable[[str, ToNode], object], logs: LogCopies, now: float) -> None:
        self.name = name
        self.joined = self.came = self.silent = False
        self.misfit = ""
        self._judged_s = -inf
        self.running: tuple[str, ...] = ()
        self.heard_s = now
        self._to = send
        self._logs = logs

    def may_rejoin(self, now: float) -> bool:
        """Return True if its agent may join anew: if it did not fit, only after a while."""
        if self.misfit and now - self._judged_s < _JUDGE_AGAIN_S:
            return False
        self._judged_s = now
        return True

    def launch(self, job: str, program: Program, environ: Mapping[str, str], attempt: int) -> None:
        """Start the command of ``job`` there."""
        copied = self._logs.copied(job, self.name)
        self.tell(Start(job=job, attempt=attempt, program=program, environ=dict(environ), copied=copied))

    def start_ahead(self, job: str, program: Program, environ: Mapping[str, str], attempt: int) -> None:
        """Start the command of ``job`` there before its turn."""
        self.tell(StartAhead(job=job, attempt=attempt, program=program, environ=dict(environ)))

    def give_up_ahead(self, job: str) -> None:
        """End the command of ``job`` that was started there before its turn, if there is one."""
        self.tell(GiveUpAhead(job=job))

    def find_port(self, job: str, attempt: int) -> None:
        """Ask at which of the node's ports the ranks of that attempt meet."""
        self.tell(FindPort(job=job, attempt=attempt))

    def find(self, sought: Sought) -> None:
        """Ask for the state of a job's processes."""
        self.tell(Find(sought=sought))

    def watch_rank(self, job: str, attempt: int, rank: int, pid: int, identity: bytes) -> None:
        """Ask for a report when that process is gone."""
        self.tell(WatchRank(job=job, attempt=attempt, rank=rank, pid=pid, identity=identity))

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send ``frame`` to the rank at ``identity``."""
        self.tell(ToRank(identity=identity, frame=frame))

    def end(self, job: str, attempt: int, *, grace_s: float) -> None:
        """End every process of ``job`` there, up to ``attempt``."""
        self.tell(End(job=job, attempt=attempt, grace_s=grace_s))

    def tell(self, message: ToNode) -> None:
        """Send ``message`` if the node's agent is connected."""
        if self.joined:
            self._to(self.name, message)


class RemoteNodes:
    """All nodes with agents.

    Parameters
    ----------
    addresses
        Addresses of the nodes for each other, by name; the scheduler's own node has the name "".
    endpoint
        Where their agents connect.
    keys
        Directory of keys; agents have those of a client.
    clock
        What time it is.
    lost_after_s
        After so long without a word a node is lost.
    transfer
        What brings the state of a job to another node; ``None``: nothing does, jobs begin anew there.
    standby
        As for ``Transfers``.

    Attributes
    ----------
    transfers
        States on their way to other nodes; ``transfers.reap`` is to be called when that can be read.
    socket, authenticator
        To be polled; ``receive`` and ``authenticator.answer`` are to be called when they can be read.
    changed
        Called with a node when its agent has joined, when it falls silent, and when it counts as lost.
    answers
        Called with a node that was silent and answers again over the same connection.
    judge
        Called with a node's name and what its agent says that it has, and whether the agent joins with it.
        Returns why the node cannot be used; empty if it can.
    absent
        Called with the name of a node whose agent has not joined in time.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        endpoint: str,
        keys: Path,
        clock: Clock,
        *,
        lost_after_s: float = LOST_AFTER_S,
        transfer: Command | None = None,
        standby: Sequence[str] = (),
    ) -> None:
        self._clock = clock
        self.transfers = None if transfer is None else Transfers(transfer, standby)
        self._lost_after_s = lost_after_s
        self._context = zmq.Context()
        self.authenticator = KeyAuthenticator(self._context, keys)
        self.socket = bind_tcp(self._context, endpoint, scheduler_keys(keys), options=OPTIONS)
        self._relay = Relay(self.socket, self._serve)
        self.addresses = dict(addresses)
        self.nodes: dict[str, RemoteNode] = {}
        self._lost: list[RemoteNode] = []
        self.changed: Callable[[RemoteNode], object] = lambda node: None
        self.answers: Callable[[RemoteNode], object] = lambda node: None
        self.judge: Callable[[str, bytes, bool], str] = lambda name, facts, joins: ""
        self.absent: Callable[[str], object] = lambda name: None
        #: Since when agents are awaited of whom nothing was ever heard. None: not yet.
        self._awaited_s: float | None = None

    @property
    def endpoint(self) -> str:
        """Address at which agents connect."""
        found = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(found, bytes)
        return found.rstrip(b"\0").decode()

    def begin(self, reports: Reports, logs: Callable[[str, str], Path]) -> None:
        """Set the receiver of reports and the place of the logs."""
        self._reports = reports
        self._logs = LogCopies(logs)
        self.nodes = {
            name: RemoteNode(name, self._send, self._logs, self._clock.now())
            for name in self.addresses
            if name
        }

    def expect_all(self) -> None:
        """Count each node's silence from now on: no scheduler listened before."""
        for node in self.nodes.values():
            node.heard_s = self._clock.now()

    @property
    def lost(self) -> frozenset[str]:
        """Nodes that have been silent for too long."""
        return frozenset(node.name for node in self._lost)

    def copied(self, job: str, node: str) -> tuple[int, int]:
        """Return how much of a job's output was copied from a node (``LogCopies.copied``)."""
        return self._logs.copied(job, node)

    def receive(self) -> None:
        """Handle waiting messages of agents."""
        for _ in range(_MESSAGES_AT_ONCE):
            if not self.socket.poll(0):
                return
            first, *parts = self.socket.recv_multipart(copy=False)
            if (identity := first.bytes).startswith(MARK) and parts:
                self._relay.take(identity, parts)
                continue
            frames = [part.bytes for part in parts]
            name = identity.decode(errors="replace")
            try:
                if name not in self.nodes or len(frames) != 1:
                    raise RemoteProtocolError(f"{name!r} is no node of this scheduler")
                self._take(self.nodes[name], decode_from_node(frames[0]))
            except GpusliceError as error:
                _log.warning("rejected a message of node %s: %s", name, error)

    def stand_by(self, names: Iterable[str]) -> None:
        """Have processes started, here and on those nodes, for a transfer that is to come."""
        if self.transfers is not None:
            self.transfers.stand_by()
            for name in filter(None, names):
                self.nodes[name].tell(StandBy())

    def await_all(self) -> None:
        """Note that an agent was started on each node, and should join soon."""
        self._awaited_s = self._clock.now()

    def attend(self) -> None:
        """Report nodes that have fallen silent, that are lost, or whose agents have not joined in time."""
        now = self._clock.now()
        if self._awaited_s is not None and now - self._awaited_s >= COME_S:
            self._awaited_s = None
            for node in [node for node in self.nodes.values() if not node.came and node not in self._lost]:
                self.absent(node.name)
        for node in self.nodes.values():
            silent_s = now - node.heard_s
            if silent_s >= self._silent_after_s(node) and not node.silent:
                node.silent = True
                self.changed(node)
            if silent_s >= self._lost_after_s and node not in self._lost:
                self._lose(node)

    def _silent_after_s(self, node: RemoteNode) -> float:
        return min(SILENT_AFTER_S if node.came else _FIRST_WORD_S, self._lost_after_s)

    def _lose(self, node: RemoteNode) -> None:
        node.joined, node.silent = False, True
        self._lost.append(node)
        self.changed(node)

    @property
    def next_deadline_s(self) -> float | None:
        """When ``attend`` must be called, even if nothing happens; None for never."""
        dues_s = [
            node.heard_s + (self._lost_after_s if node.silent else self._silent_after_s(node))
            for node in self.nodes.values()
            if node not in self._lost
        ]
        if self._awaited_s is not None:
            dues_s.append(self._awaited_s + COME_S)
        return min(dues_s, default=None)

    def silent_s(self, node: RemoteNode) -> float:
        """Return for how long nothing was heard of ``node``."""
        return self._clock.now() - node.heard_s

    def give_up(self, name: str) -> None:
        """Count a node without an agent as lost at once, until its agent joins."""
        node = self.nodes[name]
        if not node.joined and node not in self._lost:
            self._lose(node)

    def dismiss(self) -> None:
        """Tell all connected agents to leave, and wait for their answers."""
        ends_s = self._clock.now() + _DISMISS_S
        for node in self.nodes.values():
            node.tell(Leave())
        while any(node.joined for node in self.nodes.values()):
            pause_s = ends_s - self._clock.now()
            if pause_s <= 0 or not self.socket.poll(int(pause_s * 1000.0) + 1):
                return
            self.receive()

    def close(self) -> None:
        """Send queued messages, close the socket, and end all transfers."""
        if self.transfers is not None:
            self.transfers.close()
        self._context.destroy(linger=1000)

    def _take(self, node: RemoteNode, message: FromNode) -> None:
        if isinstance(message, Joined):
            self._join(node, message)
            return
        if not node.joined:  # of a connection that is over, or one that we took to be
            if isinstance(message, Beat) and node.may_rejoin(self._clock.now()):
                self._send(node.name, Rejoin())
            return
        node.heard_s = self._clock.now()
        if node.silent:
            node.silent = False
            self.answers(node)
        match message:
            case FromRank():
                connection = Connection(node.name, message.identity)
                self._reports.heard(connection, message.pid, message.frame)
            case Ended():
                self._reports.ended(node.name, message.event)
            case Missing():
                self._reports.missing(node.name, message.job, message.attempt)
            case PortFound():
                self._reports.port_found(message.job, message.attempt, message.port)
            case WaitsAhead():
                self._reports.waits_ahead(message.job, message.attempt)
            case Printed():
                end = self._logs.store(node.name, message)
                node.tell(Stored(job=message.job, stream=message.stream, end=end))
            case Left():
                node.joined = False
            case Beat():
                if message.facts:
                    self.judge(node.name, message.facts, False)
                self._answer(node, message)

    def _join(self, node: RemoteNode, message: Joined) -> None:
        node.came = True
        if message.version != VERSION:
            raise RemoteProtocolError(
                f"version {message.version} is not {VERSION}", "run the same gpuslice on all nodes"
            )
        node.misfit = self.judge(node.name, message.facts, True)
        if node.misfit:
            # Its lease is not renewed: what runs there stops before it may be started elsewhere.
            node.joined = False
            if not message.running:
                self.give_up(node.name)
            return
        node.joined, node.silent = True, False
        node.heard_s, node.running = self._clock.now(), message.running
        if node not in self._lost:
            self._answer(node, message)
            self.changed(node)
            return
        self._lost.remove(node)
        self.changed(node)
        self._answer(node, message)  # what runs elsewhere by now has been ended there before it may go on

    def _answer(self, node: RemoteNode, message: Joined | Beat) -> None:
        node.tell(Heard(beat=message.beat, lost_after_s=self._lost_after_s))

    def _serve(self, name: str, channel: str) -> bool:
        """Have a process for snapshots started on a node. Return False if the node is not there."""
        if (node := self.nodes.get(name)) is None or not node.joined:
            return False
        node.tell(Serve(channel=channel))
        return True

    def _send(self, name: str, message: ToNode) -> None:
        try:
            self.socket.send_multipart([name.encode(), encode(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            # It will join again, and be asked what became of everything.
            self.nodes[name].joined = False
            _log.info("%s for node %s could not be sent: %s", type(message).__name__, name, error)
