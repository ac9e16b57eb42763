"""The sessions of the ranks: which connection is which rank, and what it may say.

A frame that is not a message, or not one that its sender may send, is answered with ``Rejected`` and changes
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from gpuslice import wire
from gpuslice.errors import GpusliceError, RemoteProtocolError
from gpuslice.sched_core.journal.journal import JournalError
from gpuslice.sched_core.lifecycle.events import Reported, Tell
from gpuslice.sched_core.nodes.node import Connection
from gpuslice.sched_core.nodes.rank_socket import rejection

_log = logging.getLogger(__name__)


class _Peer(NamedTuple):
    """A process that is, was or waits to be a rank of a job."""

    job: str
    rank: int
    pid: int


class RankSessions:
    """The scheduler's connections with all ranks.

    Parameters
    ----------
    send
        Sends a frame to the rank at a connection.
    handle
        Called with each report. The rank is told of its errors.
    greeted
        Called when a rank has said Hello and that was accepted: its attempt (None: the present one), job,
        rank, process, connection.
    processes
        Returns the process that is a rank of a job now, and those that wait to be.
    """

    def __init__(
        self,
        send: Callable[[Connection, bytes], object],
        handle: Callable[[Reported], None],
        greeted: Callable[[int | None, str, int, int, Connection], None],
        processes: Callable[[str, int], Sequence[int]],
    ) -> None:
        self._to = send
        self._handle = handle
        self._greeted = greeted
        self._processes = processes
        self._routes: dict[_Peer, Connection] = {}
        self._peers: dict[Connection, _Peer] = {}

    def forget(self, node: str) -> None:
        """Forget all connections of ranks on ``node``: they are over. Others may get their identities."""
        self._routes = {peer: found for peer, found in self._routes.items() if found.node != node}
        self._peers = {found: peer for found, peer in self._peers.items() if found.node != node}

    def tell(self, command: Tell) -> None:
        """Send an order to its rank, if the rank has said Hello."""
        pid = command.pid or self._holder(command.job, command.rank)
        connection = self._routes.get(_Peer(command.job, command.rank, pid))
        if connection is not None:  # else it has not greeted us yet, and hears of it then
            self._send(connection, command.message)

    def _holder(self, job: str, rank: int) -> int:
        """Return the pid of the process that is the rank now. Return 0 if there is none."""
        return next(iter(self._processes(job, rank)), 0)

    def hear(self, connection: Connection, pid: int, frame: bytes) -> None:
        """Handle ``frame``, which process ``pid`` sent. Answer with the error if it is rejected."""
        try:
            self._take(connection, pid, frame)
        except JournalError:
            raise
        except GpusliceError as error:
            _log.info("rejected a message of %s: %s", self._peers.get(connection, "an unknown sender"), error)
            self._send(connection, rejection(error.message, error.remedy))
        except Exception as error:  # noqa: BLE001 - a message is no reason to end; told and logged
            _log.exception("a message of %s failed", self._peers.get(connection, "an unknown sender"))
            told = rejection(f"{type(error).__name__}: {error}", "scheduler.jsonl says more")
            self._send(connection, told)

    def _take(self, connection: Connection, pid: int, frame: bytes) -> None:
        message = wire.decode_from_agent(frame)
        if isinstance(message, wire.Hello):
            self._welcome(connection, message, pid)
            return
        peer = self._peers.get(connection)
        if peer is None:
            raise RemoteProtocolError(f"{type(message).__name__} of an unknown rank", "say Hello first")
        if peer.pid == self._holder(peer.job, peer.rank):  # else another process is the rank, or waits to be
            self._handle(Reported(peer.job, peer.rank, message))

    def _welcome(self, connection: Connection, hello: wire.Hello, pid: int) -> None:
        if hello.version != wire.PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"protocol version {hello.version} is not {wire.PROTOCOL_VERSION}",
                "run the same gpuslice on both sides",
            )
        peer = _Peer(hello.job, hello.rank, pid)
        # Known before the core answers, because the answer may already be a lease.
        before, self._routes[peer] = self._routes.get(peer), connection
        self._send(connection, wire.Welcome(version=wire.PROTOCOL_VERSION))
        try:
            self._handle(Reported(hello.job, hello.rank, msgspec.structs.replace(hello, pid=pid)))
        except GpusliceError:
            del self._routes[peer]
            if before is not None:
                self._routes[peer] = before
            raise
        if before is not None and before != connection:
            self._peers.pop(before, None)
        self._peers[connection] = peer
        self._greeted(hello.attempt, hello.job, hello.rank, pid, connection)

    def _send(self, connection: Connection, message: wire.ToAgent) -> None:
        self._to(connection, wire.encode(message))
