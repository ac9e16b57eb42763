"""Messages between the scheduler and its agent on another node: tagged structs, decoded strictly.

Each is one ZeroMQ frame of msgpack. An agent that has connected says ``Joined`` first, and is then asked what
became of every job that has processes there (``Find``). So nothing has to be kept for a node that cannot be
reached: what was lost follows from what is found.
"""

from __future__ import annotations

from typing import Literal, cast

import msgspec
import zmq

from gpuslice.sched_core.core.events import Exited, RankGone
from gpuslice.sched_core.jobs.program import Program
from gpuslice.types import ByteCount, Count, JobName, Pid, PortNumber, RankNumber, Seconds, VariableName, Word
from gpuslice.wire import MAX_MESSAGE_BYTES, decode_frame

from .node import Sought

VERSION = 3
#: A rank's longest message, or a command with its environment, and what is around it.
MAX_BYTES = 4 * MAX_MESSAGE_BYTES
BEAT_S = 1.0
#: Between two words of libzmq that keep a connection alive, and how long it waits for an answer.
_PING_MS, _PONG_MS = 5_000, 15_000
#: Of the sockets at both ends: no message is dropped for want of room, and a silent peer is noticed.
OPTIONS = {
    zmq.MAXMSGSIZE: MAX_BYTES,
    zmq.SNDHWM: 0,
    zmq.RCVHWM: 0,
    zmq.HEARTBEAT_IVL: _PING_MS,
    zmq.HEARTBEAT_TIMEOUT: _PONG_MS,
}
Stream = Literal["out", "err"]


class NodeMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages."""


class Start(NodeMessage, tag="start", frozen=True):
    """Start the command of a job; ``copied`` as in ``Sought``."""

    job: JobName
    attempt: Count
    program: Program
    environ: dict[VariableName, Word]
    copied: tuple[ByteCount, ByteCount] = (0, 0)


class FindPort(NodeMessage, tag="find_port", frozen=True):
    """Tell at which port of yours the ranks of that attempt are to meet."""

    job: JobName
    attempt: Count


class Find(NodeMessage, tag="find", frozen=True):
    """Watch what there is of a job, and tell what is gone."""

    sought: Sought


class WatchRank(NodeMessage, tag="watch_rank", frozen=True):
    """That process is a rank: tell when it is gone."""

    job: JobName
    rank: RankNumber
    pid: Pid
    identity: bytes


class ToRank(NodeMessage, tag="to_rank", frozen=True):
    """Hand ``frame`` to the rank of that identity."""

    identity: bytes
    frame: bytes


class End(NodeMessage, tag="end", frozen=True):
    """End every process of a job, which has so long to end by itself; 0: it is not asked."""

    job: JobName
    grace_s: Seconds


class Stored(NodeMessage, tag="stored", frozen=True):
    """What a job has printed has been copied up to there."""

    job: JobName
    stream: Stream
    end: ByteCount


class Rejoin(NodeMessage, tag="rejoin", frozen=True):
    """You were not heard of for too long: begin as on a new connection."""


class Heard(NodeMessage, tag="heard", frozen=True):
    """Answer to a beat: its number, and after how long without a word the node is lost (lease.py)."""

    beat: Count
    lost_after_s: Seconds


class Leave(NodeMessage, tag="leave", frozen=True):
    """End; what still runs on the node is nobody's any more, so end that, too."""


class Joined(NodeMessage, tag="joined", frozen=True):
    """The first words of an agent on every connection; ``running``: the jobs whose commands run here.

    It counts as a beat.
    """

    version: Count
    beat: Count
    running: tuple[JobName, ...]


class FromRank(NodeMessage, tag="from_rank", frozen=True):
    """What a rank, process ``pid`` as the kernel says, has sent."""

    identity: bytes
    pid: Pid
    frame: bytes


class Ended(NodeMessage, tag="ended", frozen=True):
    """A command or a rank has ended."""

    event: Exited | RankGone


class Missing(NodeMessage, tag="missing", frozen=True):
    """The command of a job that was sought was never started."""

    job: JobName


class PortFound(NodeMessage, tag="port_found", frozen=True):
    """Answer to ``FindPort``: the same for an attempt however often it is asked for."""

    job: JobName
    attempt: Count
    port: PortNumber


class Printed(NodeMessage, tag="printed", frozen=True):
    """What a job has printed from byte ``offset`` on; the next follows when this one is stored."""

    job: JobName
    stream: Stream
    offset: ByteCount
    data: bytes


class Left(NodeMessage, tag="left", frozen=True):
    """Answer to ``Leave``, which is heard: nothing more will follow."""


class Beat(NodeMessage, tag="beat", frozen=True):
    """Nothing new; the node is there."""

    beat: Count


ToNode = Start | FindPort | Find | WatchRank | ToRank | End | Stored | Heard | Rejoin | Leave
FromNode = Joined | FromRank | Ended | Missing | PortFound | Printed | Left | Beat

_WHAT = "a message of a node"
_encoder = msgspec.msgpack.Encoder()
_to_node = msgspec.msgpack.Decoder(ToNode)
_from_node = msgspec.msgpack.Decoder(FromNode)


def encode(message: ToNode | FromNode) -> bytes:
    """Encode one message."""
    return _encoder.encode(message)


def decode_to_node(frame: bytes) -> ToNode:
    """Decode what the scheduler sent; raises ``RemoteProtocolError`` for anything but a valid message."""
    return cast(ToNode, decode_frame(_to_node, frame, _WHAT))


def decode_from_node(frame: bytes) -> FromNode:
    """Decode what an agent sent; raises ``RemoteProtocolError`` for anything but a valid message."""
    return cast(FromNode, decode_frame(_from_node, frame, _WHAT))
