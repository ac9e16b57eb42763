"""The ROUTER socket to which ranks connect: who is who there, and what they may say.

A frame that is not a message, or not one that its sender may send, is answered with ``Rejected`` and changes
nothing.
"""

from __future__ import annotations

import logging
import socket as sockets
import struct
from collections.abc import Callable

import msgspec
import zmq

from gpuslice import wire
from gpuslice.errors import GpusliceError, RemoteProtocolError
from gpuslice.sched_core.core.events import Reported, Tell
from gpuslice.sched_core.journal.journal import JournalError
from gpuslice.types import shortened

from .endpoint import check_sender, receive

_MESSAGES_AT_ONCE = 100
#: The kernel's ``struct ucred``: pid, uid, gid.
_CREDENTIALS = struct.Struct("iII")
#: Of an error that is sent to a rank.
_ERROR_CHARACTERS = 4096
_log = logging.getLogger(__name__)


class RankSocket:
    """The scheduler's end of all ranks' connections.

    Parameters
    ----------
    socket
        Bound.
    handle
        Called with each report; its errors are answered.
    greeted
        Called when a rank has said Hello and that was accepted: job, rank, process.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        handle: Callable[[Reported], None],
        greeted: Callable[[str, int, int], None],
    ) -> None:
        self._socket = socket
        self._handle = handle
        self._greeted = greeted
        self._routes: dict[tuple[str, int], bytes] = {}
        self._peers: dict[bytes, tuple[str, int]] = {}
        #: Our end of a rank's newest connection, and the process at the other.
        self._connections: dict[tuple[str, int], tuple[int, int]] = {}

    def tell(self, command: Tell) -> None:
        """Send an order."""
        identity = self._routes.get((command.job, command.rank))
        if identity is not None:  # else it has not greeted us yet, and hears of it then
            self._send(identity, command.message)

    def greeted(self, job: str, rank: int) -> bool:
        """Whether that rank has said Hello here."""
        return (job, rank) in self._connections

    def connected(self, job: str, rank: int) -> bool:
        """Whether something that a rank said may still be on its way to `receive`.

        When the process is gone, libzmq reads what it left in the connection, hands it over, and only then
        closes our end. A forked child of the rank may hold the connection for longer.
        """
        descriptor, pid = self._connections.get((job, rank), (-1, 0))
        return descriptor >= 0 and _process_at(descriptor) == pid

    def receive(self) -> bool:
        """Deal with what is there, but not with so much of it that timers and processes would wait.

        Returns
        -------
        bool
            Whether that was all.
        """
        for _ in range(_MESSAGES_AT_ONCE):
            if (message := receive(self._socket)) is None:
                return True
            identity, frames = message
            try:
                self._take(identity, frames)
            except JournalError:
                raise
            except GpusliceError as error:
                _log.info("rejected a message of %s: %s", self._peers.get(identity, "a stranger"), error)
                self._reject(identity, error.message, error.remedy)
            except Exception as error:  # noqa: BLE001 - a message is no reason to end; told and logged
                _log.exception("a message of %s failed", self._peers.get(identity, "a stranger"))
                self._reject(identity, f"{type(error).__name__}: {error}", "scheduler.jsonl says more")
        return False

    def _reject(self, identity: bytes, error: str, remedy: str) -> None:
        error, remedy = (shortened(text, _ERROR_CHARACTERS) for text in (error, remedy))
        self._send(identity, wire.Rejected(error=error, remedy=remedy))

    def _take(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        if not frames:
            raise RemoteProtocolError("a message of too many frames or bytes", "send one frame")
        if len(frames) != 1:
            raise RemoteProtocolError(f"a message of {len(frames)} frames", "send one frame")
        pid = check_sender(frames[0])
        message = wire.decode_from_agent(frames[0].bytes)
        if isinstance(message, wire.Hello):
            self._welcome(identity, message, pid, frames[0].get(zmq.SRCFD))
            return
        peer = self._peers.get(identity)
        if peer is None:
            raise RemoteProtocolError(f"{type(message).__name__} of an unknown rank", "say Hello first")
        self._handle(Reported(*peer, message))

    def _welcome(self, identity: bytes, hello: wire.Hello, pid: int, descriptor: int) -> None:
        if hello.version != wire.PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"protocol version {hello.version} is not {wire.PROTOCOL_VERSION}",
                "run the same gpuslice on both sides",
            )
        peer = (hello.job, hello.rank)
        # Known before the core answers, because the answer may already be a lease.
        former, self._routes[peer] = self._routes.get(peer), identity
        self._send(identity, wire.Welcome(version=wire.PROTOCOL_VERSION))
        try:
            self._handle(Reported(*peer, msgspec.structs.replace(hello, pid=pid)))
        except GpusliceError:
            del self._routes[peer]
            if former is not None:
                self._routes[peer] = former
            raise
        if former is not None:
            self._peers.pop(former, None)
            if former != identity:
                self._send(former, wire.Replaced())
        self._peers[identity] = peer
        self._connections[peer] = (descriptor, pid)
        self._greeted(hello.job, hello.rank, pid)

    def _send(self, identity: bytes, message: wire.ToAgent) -> None:
        try:
            self._socket.send_multipart([identity, wire.encode(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Unreachable: its process is ending, which the pidfd reports. Full: it does not read, which is
            # the same as not answering.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            _log.warning("%s could not be sent: %s", type(message).__name__, error)


def _process_at(descriptor: int) -> int | None:
    """The process that connected to our end of a local connection; ``None`` if it is none any more."""
    try:
        end = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM, fileno=descriptor)
    except OSError:
        return None
    try:
        found = end.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return None
    finally:
        end.detach()  # it is libzmq's to close
    pid: int = _CREDENTIALS.unpack(found)[0]
    return pid
