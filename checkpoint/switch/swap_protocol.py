"""The swap protocol of two processes on one device: what they say to each other, and how (docs/duplex.md).

They talk on a socket of the operating system, so that the end of either process is seen at once. After
``Whole``, or when the predecessor's process no longer exists, the device is the successor's; never before.
After ``Failed`` it is the predecessor's again as soon as the successor has said ``Back``, or no longer
exists. The predecessor waits for the successor nowhere else, and whatever goes wrong at the successor's end
ends in ``Back``: so one of the two always comes to its end.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from typing import Generic, TypeVar

import msgspec

from gpuslice.errors import HandoverError

VERSION = 3
#: The listener's name in a store's directory.
SOCKET = "swap"
#: How long one end waits for a word of the other. A word comes with every portion, and a portion of
#: several gigabytes takes seconds.
PATIENCE_S = 60.0
_MESSAGE_BYTES = 1 << 14


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what the two say."""


class Terms(_Message, frozen=True):
    """Which swap this is; what the two ends say must be the same.

    Attributes
    ----------
    predecessor, successor
        The jobs.
    epoch
        Of the successor's lease: the fencing token.
    device
        Where.
    """

    predecessor: str
    successor: str
    epoch: int
    device: str


class Offer(_Message, frozen=True, tag="offer"):
    """The predecessor's first words."""

    version: int
    terms: Terms
    nbytes: int


class Answer(_Message, frozen=True, tag="answer"):
    """The successor's: why nothing need be given back early, or nothing."""

    problem: str


class Gave(_Message, frozen=True, tag="gave"):
    """Bytes that the device has back from the predecessor, in all so far."""

    nbytes: int


class Whole(_Message, frozen=True, tag="whole"):
    """The predecessor is published, and nothing of it is left on the device."""


class Failed(_Message, frozen=True, tag="failed"):
    """The predecessor could not leave, and wants back what it gave."""

    error: str


class Back(_Message, frozen=True, tag="back"):
    """The successor has nothing on the device."""


FromPredecessor = Offer | Gave | Whole | Failed
FromSuccessor = Answer | Back
_Heard = TypeVar("_Heard")
_encode = msgspec.msgpack.Encoder().encode


class PeerExited(Exception):
    """The process at the other end no longer exists: what it had, the system has back."""


class PeerClosed(Exception):
    """The other process has closed its end; it may live on, with whatever it has on the device."""


class End(Generic[_Heard]):
    """One end of a connection that is open.

    Parameters
    ----------
    connection
        To the other process, which must be this user's.
    expected
        What the other may say.
    patience_s
        How long to wait for a word of it.

    Raises
    ------
    HandoverError
        If it is somebody else's, or cannot be watched.
    """

    def __init__(
        self,
        connection: socket.socket,
        expected: msgspec.msgpack.Decoder[_Heard],
        patience_s: float,
    ) -> None:
        self.patience_s = patience_s
        self._socket = connection
        self._expected = expected
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            raise HandoverError(f"is user {uid}'s")
        connection.setblocking(False)
        try:
            self._process = os.pidfd_open(pid)
        except OSError as error:
            raise HandoverError(f"cannot be watched, process {pid}: {error.strerror}") from error

    def try_send(self, message: FromPredecessor | FromSuccessor) -> bool:
        """Send, if the other still reads; whether that could be done at once."""
        try:
            self._socket.send(_encode(message))
        except OSError:  # there is no room for it, or the other has closed the connection
            return False
        return True

    def send(self, message: FromPredecessor | FromSuccessor) -> None:
        """Send as soon as there is room for it; the other may have gone, or be out of patience by then."""
        deadline_s = time.monotonic() + self.patience_s
        while not self.try_send(message):
            if self._poll(select.POLLOUT, deadline_s) != {self._socket.fileno(): select.POLLOUT}:
                return

    def receive(self, timeout_s: float) -> _Heard | None:
        """The next thing that the other has to say; ``None`` if that takes longer.

        Raises
        ------
        PeerExited
            If its process no longer exists, and it has no more to say.
        PeerClosed
            If it has closed the connection.
        HandoverError
            If it says something that is no message.
        """
        ready = self._poll(select.POLLIN, time.monotonic() + timeout_s)
        if self._socket.fileno() in ready:
            data = self._read()
            if not data:
                raise PeerClosed
            return self._decode(data)
        if ready:
            raise PeerExited
        return None

    def filenos(self) -> tuple[int, ...]:
        """What can be read when there is something to hear, or the other process has ended."""
        return self._socket.fileno(), self._process

    def await_end(self, timeout_s: float) -> bool:
        """Wait for the end of the other process; whether it came."""
        poller = select.poll()  # which takes descriptors of any number; select does not
        poller.register(self._process, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000.0))

    def _read(self) -> bytes:
        try:
            return self._socket.recv(_MESSAGE_BYTES)
        except OSError:  # it was closed with something of ours unread
            return b""

    def _decode(self, data: bytes) -> _Heard:
        try:
            return self._expected.decode(data)
        except msgspec.DecodeError as error:
            raise HandoverError(f"said something that is no message: {error}") from error

    def _poll(self, events: int, deadline_s: float) -> dict[int, int]:
        poller = select.poll()
        poller.register(self._process, select.POLLIN)
        poller.register(self._socket, events)
        return dict(poller.poll(max(0.0, deadline_s - time.monotonic()) * 1000.0))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
        os.close(self._process)


from_predecessor = msgspec.msgpack.Decoder(FromPredecessor)
from_successor = msgspec.msgpack.Decoder(FromSuccessor)


def new_socket() -> socket.socket:
    """One that keeps messages apart."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
