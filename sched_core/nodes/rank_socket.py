"""The ROUTER socket to which the ranks of one machine connect, with their identities and connections."""

from __future__ import annotations

import logging
import socket as sockets
import struct
from collections.abc import Callable
from typing import NamedTuple

import zmq

from gpuslice import wire
from gpuslice.errors import GpusliceError, RemoteProtocolError
from gpuslice.types import shortened

from .endpoint import check_sender, receive

_MESSAGES_AT_ONCE = 100
#: Layout of the kernel's ``struct ucred``: pid, uid, gid.
_CREDENTIALS = struct.Struct("iII")
#: Most characters of an error that is sent to a rank.
_ERROR_CHARACTERS = 4096
#: With more identities than this, those without a connection are forgotten.
_MANY = 4096
_log = logging.getLogger(__name__)


class _End(NamedTuple):
    """The process at the other end of a connection, and the connection's descriptor here."""

    descriptor: int
    pid: int


class RankSocket:
    """The socket to which the ranks of this machine connect.

    Parameters
    ----------
    socket
        Bound.
    heard
        Called with each frame of a process of this user: the sender's identity, its pid, the frame.
    """

    def __init__(self, socket: zmq.Socket[bytes], heard: Callable[[bytes, int, bytes], object]) -> None:
        self.socket = socket
        self._heard = heard
        #: Newest connection of each identity, and of each process that has greeted as a rank.
        self._connections: dict[bytes, _End] = {}
        self._ranks: dict[tuple[str, int, int], _End] = {}

    def note(self, job: str, rank: int, pid: int, identity: bytes) -> None:
        """Record that ``identity`` is that rank, process ``pid``, from now on."""
        self._ranks[job, rank, pid] = self._connections.get(identity, _End(-1, pid))

    def greeted(self, job: str, rank: int, pid: int) -> bool:
        """Return True if that process has said Hello as that rank here."""
        return (job, rank, pid) in self._ranks

    def connected(self, job: str, rank: int, pid: int) -> bool:
        """Return True if a message of process ``pid`` of a rank may still be on its way to `receive`.

        When the process is gone, libzmq reads what it left in the connection, hands it over, and only then
        closes our end. A forked child of the rank may hold the connection for longer.
        """
        end = self._ranks.get((job, rank, pid))
        return end is not None and end.descriptor >= 0 and _process_at(end.descriptor) == end.pid

    def forget(self, job: str, rank: int, pid: int) -> None:
        """Forget a process that has ended, once no more messages can come from it."""
        self._ranks.pop((job, rank, pid), None)

    def receive(self) -> bool:
        """Handle waiting messages, a limited number at a time, so that timers and processes need not wait.

        Returns
        -------
        bool
            True if no message is left.
        """
        for _ in range(_MESSAGES_AT_ONCE):
            if (message := receive(self.socket)) is None:
                return True
            identity, frames = message
            try:
                pid = _sender(frames)
            except GpusliceError as error:
                _log.info("rejected a message of an unknown sender: %s", error)
                self.send(identity, wire.encode(rejection(error.message, error.remedy)))
                continue
            self._connections[identity] = _End(frames[0].get(zmq.SRCFD), pid)
            if len(self._connections) > _MANY:
                self._forget_closed()
            self._heard(identity, pid, frames[0].bytes)
        return False

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send ``frame``. It is dropped if the rank is gone or does not read."""
        try:
            self.socket.send_multipart([identity, frame], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Unreachable: its process is ending, which the pidfd reports. Full: it does not read, which is
            # the same as not answering.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            _log.warning("a message for %r could not be sent: %s", identity, error)

    def _forget_closed(self) -> None:
        for identity, end in list(self._connections.items()):
            if _process_at(end.descriptor) != end.pid:
                del self._connections[identity]


def rejection(error: str, remedy: str) -> wire.Rejected:
    """Return the answer to a message that was not accepted."""
    error, remedy = (shortened(text, _ERROR_CHARACTERS) for text in (error, remedy))
    return wire.Rejected(error=error, remedy=remedy)


def _sender(frames: list[zmq.Frame]) -> int:
    """Return the process that sent ``frames``. Raise unless there is exactly one frame."""
    if not frames:
        raise RemoteProtocolError("a message of too many frames or bytes", "send one frame")
    if len(frames) != 1:
        raise RemoteProtocolError(f"a message of {len(frames)} frames", "send one frame")
    return check_sender(frames[0])


def _process_at(descriptor: int) -> int | None:
    """Return the process at the other end of a local connection; None if the connection is closed."""
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
