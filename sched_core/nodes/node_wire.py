"""Messages between the scheduler and its agent on another node: tagged structs, decoded strictly.

Each is one ZeroMQ frame of msgpack. An agent that has connected sends ``Joined`` first, and is then asked for
every job with processes there (``Find``). So nothing has to be kept for a node that cannot be reached: lost
messages do not matter, because the present state is found again.
"""

from __future__ import annotations

from typing import Literal, cast

import msgspec
import zmq

from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import Exited, RankGone
from gpuslice.types import ByteCount, Count, JobName, Pid, PortNumber, RankNumber, Seconds, VariableName, Word
from gpuslice.wire import MAX_MESSAGE_BYTES, decode_frame

from .node import Sought

VERSION = 7
#: Room for a rank's longest message, or a command with its environment, and the frame around it.
MAX_BYTES = 4 * MAX_MESSAGE_BYTES
BEAT_S = 1.0
#: Interval of libzmq's keep-alive messages, and its wait for an answer.
_PING_MS, _PONG_MS = 5_000, 15_000
#: Options of the sockets at both ends: no message is dropped for lack of room, and a silent peer is noticed.
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
    """Order: start the command of a job; ``copied`` as in ``Sought``."""

    job: JobName
    attempt: Count
    program: Program
    environ: dict[VariableName, Word]
    copied: tuple[ByteCount, ByteCount] = (0, 0)


class StartAhead(NodeMessage, tag="start_ahead", frozen=True):
    """Order: start the command of a job up to its gate (started_ahead.py). ``Start`` then lets it go on."""

    job: JobName
    attempt: Count
    program: Program
    environ: dict[VariableName, Word]


class GiveUpAhead(NodeMessage, tag="give_up_ahead", frozen=True):
    """Order: end the command of a job that waits at its gate, if there is one."""

    job: JobName


class FindPort(NodeMessage, tag="find_port", frozen=True):
    """Question: at which of the node's ports do the ranks of that attempt meet?"""

    job: JobName
    attempt: Count


class Find(NodeMessage, tag="find", frozen=True):
    """Order: watch the processes of a job, and report those that are gone."""

    sought: Sought


class WatchRank(NodeMessage, tag="watch_rank", frozen=True):
    """Order: watch this process, which is a rank, and report when it is gone."""

    job: JobName
    attempt: Count
    rank: RankNumber
    pid: Pid
    identity: bytes


class ToRank(NodeMessage, tag="to_rank", frozen=True):
    """Order: hand ``frame`` to the rank with that identity."""

    identity: bytes
    frame: bytes


class End(NodeMessage, tag="end", frozen=True):
    """Order: end a job's processes up to ``attempt`` after a grace; with 0 at once, without asking."""

    job: JobName
    attempt: Count
    grace_s: Seconds


class Stored(NodeMessage, tag="stored", frozen=True):
    """Acknowledgement: a job's output has been copied up to ``end``."""

    job: JobName
    stream: Stream
    end: ByteCount


class Rejoin(NodeMessage, tag="rejoin", frozen=True):
    """Order: begin as on a new connection, because the node was silent for too long."""


class Heard(NodeMessage, tag="heard", frozen=True):
    """Answer to a beat: its number, and after how long without a message the node is lost (lease.py)."""

    beat: Count
    lost_after_s: Seconds


class Serve(NodeMessage, tag="serve", frozen=True):
    """Order: start a process that sends or receives snapshots over that channel (relay.py)."""

    channel: Word


class StandBy(NodeMessage, tag="stand_by", frozen=True):
    """Order: have a process for snapshots ready, since one is to be sent from here or to here."""


class Forget(NodeMessage, tag="forget", frozen=True):
    """Order: remove the snapshots of these jobs, which will never go on."""

    jobs: tuple[JobName, ...]


class Leave(NodeMessage, tag="leave", frozen=True):
    """Order: end, and end all processes that still run on the node."""


class Joined(NodeMessage, tag="joined", frozen=True):
    """First message of an agent on every connection; ``running`` are the jobs whose commands run here.

    It counts as a beat. ``facts`` says what the node has, in words that only its two ends know.
    """

    version: Count
    beat: Count
    running: tuple[JobName, ...]
    facts: bytes = b""


class FromRank(NodeMessage, tag="from_rank", frozen=True):
    """A message of a rank; ``pid`` is its process by the kernel."""

    identity: bytes
    pid: Pid
    frame: bytes


class Ended(NodeMessage, tag="ended", frozen=True):
    """Report: a command or a rank has ended."""

    event: Exited | RankGone


class Missing(NodeMessage, tag="missing", frozen=True):
    """Report: the attempt of a job that was looked for was never started here."""

    job: JobName
    attempt: Count


class PortFound(NodeMessage, tag="port_found", frozen=True):
    """Answer to ``FindPort``, the same for an attempt however often it is asked."""

    job: JobName
    attempt: Count
    port: PortNumber


class WaitsAhead(NodeMessage, tag="waits_ahead", frozen=True):
    """Report: the command of that attempt waits at its gate. Or it has ended, or could not be started."""

    job: JobName
    attempt: Count


class Printed(NodeMessage, tag="printed", frozen=True):
    """Output of a job from byte ``offset`` on. The next part follows when this one is stored."""

    job: JobName
    stream: Stream
    offset: ByteCount
    data: bytes


class Left(NodeMessage, tag="left", frozen=True):
    """Answer to ``Leave``: no more messages will follow."""


class Beat(NodeMessage, tag="beat", frozen=True):
    """Report: the node is there, with no news; at times also what it has, as in ``Joined``."""

    beat: Count
    facts: bytes = b""


_ToSession = Start | StartAhead | GiveUpAhead | FindPort | Find | WatchRank | ToRank | End | Stored
ToNode = _ToSession | Heard | Rejoin | Serve | StandBy | Forget | Leave
FromNode = Joined | FromRank | Ended | Missing | PortFound | WaitsAhead | Printed | Left | Beat

_WHAT = "a message of a node"
_encoder = msgspec.msgpack.Encoder()
_to_node = msgspec.msgpack.Decoder(ToNode)
_from_node = msgspec.msgpack.Decoder(FromNode)


def encode(message: ToNode | FromNode) -> bytes:
    """Encode one message."""
    return _encoder.encode(message)


def decode_to_node(frame: bytes) -> ToNode:
    """Return a message of the scheduler. Raise ``RemoteProtocolError`` if it is not valid."""
    return cast(ToNode, decode_frame(_to_node, frame, _WHAT))


def decode_from_node(frame: bytes) -> FromNode:
    """Return a message of an agent. Raise ``RemoteProtocolError`` if it is not valid."""
    return cast(FromNode, decode_frame(_from_node, frame, _WHAT))
