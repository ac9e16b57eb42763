"""The line of a process that sends or receives snapshots, over the relay at the scheduler's socket.

Messages are msgpack, in parts that the socket accepts.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import msgspec
import zmq

from gpuslice import errors
from gpuslice.errors import EnvironmentUnusableError, GpusliceError, RemoteProtocolError
from gpuslice.sched_core.nodes.endpoint import host_and_port
from gpuslice.sched_core.nodes.node_wire import OPTIONS
from gpuslice.sched_core.nodes.relay import MARK, PART_BYTES

from .plan import Config

#: How often the scheduler is asked whether it is there.
_ASK_S = 1.0


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A question to the other end."""

    number: int
    method: str
    words: tuple[Any, ...]


class Result(msgspec.Struct, frozen=True, tag="result"):
    """Its answer: a value, or an error by its class."""

    number: int
    value: Any = None
    error: str = ""
    message: str = ""
    remedy: str = ""

    def get(self) -> Any:
        """Return the value, or raise the error."""
        if not self.error:
            return self.value
        kind = getattr(errors, self.error, None)
        if not (isinstance(kind, type) and issubclass(kind, GpusliceError)) or kind is GpusliceError:
            kind = EnvironmentUnusableError
        raise kind(self.message, self.remedy)


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The first message of an end: it can be asked. Said again after its connection has broken."""


Message = Call | Result | Ready
_decoder = msgspec.msgpack.Decoder(Message)


class Heard(NamedTuple):
    """A message and who has sent it; None: that process, or node, is not connected."""

    sender: str
    message: Message | None


def caller(channel: str) -> str:
    """Return what the process that asks is called."""
    return f"{MARK.decode()}ask.{channel}"


def end(channel: str, node: str) -> str:
    """Return what the process on ``node`` is called that is asked."""
    return f"{MARK.decode()}end.{channel}.{node}"


def no_answer() -> EnvironmentUnusableError:
    """Return the error that the scheduler of these nodes is not there."""
    return EnvironmentUnusableError(
        "the scheduler that has these nodes does not answer",
        "start it with the same options: gpuslice up; for nodes of Ray add --ray HOST:PORT",
    )


class Line:
    """A connection; a context manager.

    Parameters
    ----------
    config
        Endpoint and keys, as an agent has them.
    identity
        What this process is called.
    answer_s
        How long the scheduler may be silent.
    """

    def __init__(self, config: Config, identity: str, answer_s: float = 30.0) -> None:
        self._answer_s = answer_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        for option, value in OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IPV6, ":" in host_and_port(config.endpoint)[0])
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, config.scheduler.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, config.public.encode())
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, config.secret.encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(config.endpoint)
        self._answered_s = self._asked_s = time.monotonic()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._context.destroy(linger=1000)

    def was_broken(self) -> bool:
        """Return True if the connection has broken since the last call.

        What was on its way is lost then, even if the line is connected again.
        """
        found = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            found = True
        return found

    def ask_for(self, node: str, channel: str) -> None:
        """Have an end started on ``node``."""
        self._socket.send_multipart([node.encode(), channel.encode()])

    def send(self, receiver: str, message: Message | None) -> None:
        """Send a message. None only asks whether ``receiver`` is connected."""
        data = b"" if message is None else msgspec.msgpack.encode(message)
        parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
        self._socket.send_multipart([receiver.encode(), *(parts or [b""])])

    def receive(self, timeout_s: float, wake: int | None = None) -> Heard | None:
        """Return the next message; None if there is none, or the connection has broken.

        Parameters
        ----------
        wake
            A descriptor; once it can be read, nothing more is waited for.

        Raises
        ------
        EnvironmentUnusableError
            If the scheduler is not there any more.
        """
        ends_s = time.monotonic() + min(timeout_s, _ASK_S)
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, wake):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        while True:
            now = time.monotonic()
            self._ask_scheduler(now)
            left_ms = int(1000.0 * max(0.0, ends_s - now))
            if self._socket not in dict(poller.poll(left_ms)):
                return None  # the time is over, or the connection
            sender, *parts = self._socket.recv_multipart()
            self._answered_s = time.monotonic()
            name, data = sender.decode(errors="replace"), b"".join(parts)
            if not parts and name:
                return Heard(name, None)
            if data:
                return Heard(name, _decoded(data))
            # Somebody only looks whether this process is connected. If it looked back, that would never end.

    def _ask_scheduler(self, now: float) -> None:
        """Ask whether the scheduler is there, if it is time. Raise as ``receive``."""
        if now - self._asked_s >= _ASK_S:
            if now - self._answered_s > self._answer_s:
                raise no_answer()
            self._asked_s = now
            self._socket.send_multipart([b"", b""])


def _decoded(data: bytes) -> Message:
    try:
        message: Message = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"the other node sent no message: {error}") from error
    return message
