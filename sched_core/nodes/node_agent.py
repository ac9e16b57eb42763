"""The scheduler's agent on another node: handles processes as ordered, and reports on them.

It knows only the processes. Every connection to the scheduler begins from nothing: ranks are let in, so that
they greet, and jobs are searched as the scheduler asks. Without a connection jobs run on or stay parked. Jobs
that the scheduler would start elsewhere run only until it may do so (lease.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from gpuslice.clock import Clock, MonotonicClock
from gpuslice.errors import RemoteProtocolError
from gpuslice.files import private_directory
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import Exited, RankGone

from .curve import KeyPair
from .endpoint import LOCK, lock
from .lease import Lease
from .local_node import LocalNode, rank_endpoint
from .log_copies import LogTails
from .node import Connection, Reports
from .node_logs import keep_only, running
from .node_wire import (
    BEAT_S,
    OPTIONS,
    VERSION,
    Beat,
    End,
    Ended,
    Find,
    FindPort,
    Forget,
    FromNode,
    FromRank,
    GiveUpAhead,
    Heard,
    Joined,
    Leave,
    Left,
    Missing,
    PortFound,
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
    decode_to_node,
    encode,
)

_Send = Callable[[FromNode], object]
#: Start a command in its turn, and before its turn.
_Starts = tuple[Callable[[LocalNode, Start], object], Callable[[LocalNode, StartAhead], object]]
#: Interval at which to look for new output of jobs.
_LOOK_MS = 200
_AGAIN_MS = 200
_LINGER_MS = 1000
_AGAIN_AT_MOST_MS = 2000
#: Interval at which the scheduler is told what this node has.
_FACTS_S = 5.0
_log = logging.getLogger(__name__)


class NodeAgent:
    """The agent of one node; a context manager. Jobs outlive it, unless it was told to leave.

    Parameters
    ----------
    name
        Name of the node.
    directory
        For the lock, the ranks' socket and the jobs' output; made with mode 0700 if need be.
    endpoint, scheduler, keys
        Address of the scheduler, its public key, and our keys.
    logs
        What the scheduler's logs are known by (``node_logs.identity``); those here that belong to others are
        set aside.
    environ
        Variables that every job of this node gets, over all others.
    adapt
        Returns a job's program as it is started on this node, and why it cannot be; empty if it can.
    serve
        Called with a channel, to start a process that sends or receives snapshots over it.
    stand_by
        Called to have such a process ready.
    forget
        Called with jobs whose snapshots are to be removed.
    facts
        Returns what this node has, for the scheduler to judge whether it can be used.

    Raises
    ------
    EnvironmentUnusableError
        If the directory cannot be used, or another agent runs in it.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        endpoint: str,
        scheduler: bytes,
        keys: KeyPair,
        *,
        logs: str = "",
        environ: Mapping[str, str] | None = None,
        adapt: Callable[[Program], tuple[Program, str]] = lambda program: (program, ""),
        serve: Callable[[str], object] = lambda channel: None,
        stand_by: Callable[[], object] = lambda: None,
        forget: Callable[[Sequence[str]], object] = lambda jobs: None,
        facts: Callable[[], bytes] = bytes,
        clock: Clock | None = None,
    ) -> None:
        private_directory(directory, option="--state-dir", parents=True)
        self._lock = lock(directory / LOCK)
        if logs:
            keep_only(directory, logs)
        self._directory = directory
        self._environ = dict(environ or {})
        self._adapt = adapt
        self._name = name
        self._serve, self._stand_by = serve, stand_by
        self._forget = forget
        self._facts = facts
        self._clock = clock or MonotonicClock()
        self._scheduler = endpoint
        self._lease = Lease(directory, rank_endpoint(directory))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _AGAIN_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _AGAIN_AT_MOST_MS)
        for option, value in OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, scheduler)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._socket.connect(endpoint)
        self._session: _Session | None = None
        self._left = False

    def __enter__(self) -> NodeAgent:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the agent. Jobs run on, unless it was told to leave."""
        if self._session is not None:
            self._session.close()
        self._socket.disable_monitor()
        self._monitor.close()
        self._context.destroy(linger=_LINGER_MS)
        os.close(self._lock)

    def run(self, stopped: int | None = None) -> bool:
        """Serve until the scheduler sends ``Leave``, or descriptor ``stopped`` can be read.

        Returns
        -------
        bool
            True if it was told to leave.
        """
        beat_s = facts_s = 0.0
        while not self._left:
            poller = zmq.Poller()
            for source in (self._socket, self._monitor, stopped):
                if source is not None:
                    poller.register(source, zmq.POLLIN)
            if self._session is not None:
                self._session.register(poller)
            ready = dict(poller.poll(_LOOK_MS if self._session is None else self._session.pause_ms))
            if stopped is not None and stopped in ready:
                return False
            self._receive()
            self._follow()
            self._lease.enforce()
            if self._session is None:
                self._lease.renew_if_refused(self._scheduler)
                continue
            self._session.attend()
            if (now := self._clock.now()) >= beat_s:
                told = now >= facts_s
                self._send(Beat(beat=self._lease.sent(), facts=self._facts() if told else b""))
                beat_s = self._clock.now() + BEAT_S
                facts_s = now + _FACTS_S if told else facts_s
        return True

    def _follow(self) -> None:
        """Note that the connection to the scheduler has begun or ended."""
        while not self._left and self._monitor.poll(0):
            self._receive()  # the last words of the connection that may have ended
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._begin()
            elif self._session is not None:
                self._session.close()
                self._session = None

    def _begin(self) -> None:
        """Begin a new session: earlier messages are void on both sides."""
        if self._session is not None:
            self._session.close()
        while self._socket.poll(0):
            self._socket.recv()
        starts = self._start, self._start_ahead
        self._session = _Session(self._directory, starts, self._clock, self._send)
        running = self._session.running()
        facts = self._facts()
        self._send(Joined(version=VERSION, beat=self._lease.sent(), running=running, facts=facts))

    def _start(self, node: LocalNode, order: Start) -> None:
        """Start a job's command, if that is possible on this node."""
        program, problem = self._adapt(order.program)
        if problem:
            node.refuse(order.job, order.attempt, f"gpuslice: node {self._name} cannot start it: {problem}")
        else:
            self._lease.started(order.job)
            node.launch(order.job, program, {**order.environ, **self._environ}, order.attempt)

    def _start_ahead(self, node: LocalNode, order: StartAhead) -> None:
        """Start a job's command before its turn. What is in the way is told when its turn comes."""
        program, problem = self._adapt(order.program)
        if problem:
            self._send(WaitsAhead(job=order.job, attempt=order.attempt))
        else:
            node.start_ahead(order.job, program, {**order.environ, **self._environ}, order.attempt)

    def _receive(self) -> None:
        while self._session is not None and self._socket.poll(0):
            try:
                message = decode_to_node(self._socket.recv())
            except RemoteProtocolError as error:
                _log.warning("dropped what the scheduler sent: %s", error)
                continue
            if isinstance(message, Leave):
                self._send(Left())
                self._session.node.end_all()
                self._left = True
                return
            if isinstance(message, Rejoin):
                self._begin()
            elif isinstance(message, Serve):
                self._serve(message.channel)
            elif isinstance(message, StandBy):
                self._stand_by()
            elif isinstance(message, Forget):
                self._forget(message.jobs)
            elif isinstance(message, Heard):
                self._lease.renew(message.beat, message.lost_after_s)
            else:
                if isinstance(message, WatchRank | End):
                    self._lease.is_known(message.job)
                self._session.obey(message)

    def _send(self, message: FromNode) -> None:
        with suppress(zmq.Again):  # there is no connection; the next one is told in other words
            self._socket.send(encode(message), zmq.NOBLOCK)


class _Session:
    """The agent's state while it is connected."""

    def __init__(self, directory: Path, starts: _Starts, clock: Clock, send: _Send) -> None:
        self._send = send
        self._start, self._start_ahead = starts
        #: A context of its own: its end also closes the socket, and frees the path.
        self._context = zmq.Context()
        reports = Reports(self._heard, self._ended, self._missing, self._port_found, self._waits_ahead)
        self.node = LocalNode(self._context, directory, clock, reports)
        self._directory = directory
        self._tails = LogTails(self.node.processes.log, send)
        #: Ended commands whose output is not yet copied completely.
        self._exited: list[Exited] = []

    def close(self) -> None:
        """Release everything. The ranks notice that."""
        self._context.destroy(linger=0)
        self.node.close()

    def running(self) -> tuple[str, ...]:
        """Return the jobs whose commands run here."""
        return running(self._directory / "logs")

    def register(self, poller: zmq.Poller) -> None:
        """Register all descriptors to poll."""
        poller.register(self.node.ranks.socket, zmq.POLLIN)
        poller.register(self.node.fileno(), zmq.POLLIN)

    @property
    def pause_ms(self) -> int:
        """Longest time to poll, in milliseconds."""
        pause_ms = self.node.pause_ms
        return _LOOK_MS if pause_ms is None else pause_ms

    def attend(self) -> None:
        """Handle what is ready: messages, ended processes, timers."""
        self.node.ranks.receive()
        self.node.reap()
        self.node.attend()
        self._tails.send()
        self._tell_exits()

    def obey(self, message: ToNode) -> None:
        """Carry out a message of the scheduler."""
        match message:
            case Start():
                self._tails.follow(message.job, message.copied)
                self._start(self.node, message)
            case StartAhead():
                self._start_ahead(self.node, message)
            case GiveUpAhead():
                self.node.give_up_ahead(message.job)
            case FindPort():
                self.node.find_port(message.job, message.attempt)
            case Find():
                self._tails.follow(message.sought.job, message.sought.copied)
                self.node.find(message.sought)
            case WatchRank():
                who = message.job, message.attempt, message.rank, message.pid
                self.node.watch_rank(*who, message.identity)
            case ToRank():
                self.node.send(message.identity, message.frame)
            case End():
                self.node.end(message.job, message.attempt, grace_s=message.grace_s)
            case Stored():
                self._tails.stored(message.job, message.stream, message.end)
            case Heard() | Rejoin() | Serve() | StandBy() | Forget() | Leave():
                raise AssertionError("that is not a session's to do")

    def _heard(self, connection: Connection, pid: int, frame: bytes) -> None:
        self._send(FromRank(identity=connection.identity, pid=pid, frame=frame))

    def _ended(self, node: str, event: Exited | RankGone) -> None:
        if isinstance(event, Exited):
            self._exited.append(event)
            self._tell_exits()
        else:
            self._send(Ended(event=event))

    def _missing(self, node: str, job: str, attempt: int) -> None:
        self._send(Missing(job=job, attempt=attempt))

    def _port_found(self, job: str, attempt: int, port: int) -> None:
        self._send(PortFound(job=job, attempt=attempt, port=port))

    def _waits_ahead(self, job: str, attempt: int) -> None:
        self._send(WaitsAhead(job=job, attempt=attempt))

    def _tell_exits(self) -> None:
        """Report ended commands, each after all of its output was stored."""
        for event in [event for event in self._exited if self._tails.drained(event.job)]:
            self._exited.remove(event)
            self._send(Ended(event=event))
