"""Messages between a job's agents and the scheduler: small tagged structs, one union per direction.

Each message is one ZeroMQ frame of msgpack, at most ``MAX_MESSAGE_BYTES``. ``decode_*`` is the edge:
whatever is not exactly one of the messages, each value within its range (``types``), becomes a
``RemoteProtocolError``, and nothing behind the edge ever sees it. Tensors never ride this socket.
"""

from __future__ import annotations

from typing import TypeVar, cast

import msgspec

from gpuslice.errors import LocalProtocolError, RemoteProtocolError
from gpuslice.types import (
    ByteCount,
    Count,
    JobName,
    Label,
    Loss,
    OptionalRankCount,
    Pid,
    RankCount,
    RankNumber,
    Stages,
    StopAt,
    Text,
)

PROTOCOL_VERSION = 4
MAX_MESSAGE_BYTES = 1 << 20
#: What msgspec raises for bytes that are not what they should be; text that is not UTF-8 has its own error.
NOT_A_VALUE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages."""


class Hello(Message, tag="hello", frozen=True, omit_defaults=True):
    """A rank's first words on every connection; a scheduler that was started again learns where it stands.

    ``boundary`` and ``epoch`` are 0 in a fresh process; ``parked``: it holds still.
    ``replaces``: the process that has been this rank so far, if this one trains in its place.
    """

    version: Count
    job: JobName
    rank: RankNumber
    world_size: RankCount
    pid: Pid
    boundary: Count = 0
    epoch: Count = 0
    parked: bool = True
    replaces: Pid = 0


class Progress(Message, tag="progress", frozen=True, omit_defaults=True):
    """Where a rank is: mini-batch boundaries passed, optimizer steps done. Also the heartbeat.

    ``stuck``: where the script is, if it has passed no boundary for so long that it should be known.
    ``loss``: the newest training loss that it reported, if any.
    ``unleased``: memory that it holds on GPUs of which it has no lease. ``peak_bytes``: the most memory that
    it has used on its device while it trained; 0 before its first steps, and where that is not known.
    ``went_on_from``: the boundary of the snapshot of a former process that it has gone on from, if any.
    ``samples``: how many the job, if it is elastic, has trained on, on all its ranks; 0: not known.
    """

    epoch: Count
    boundary: Count
    step: Count
    stuck: Text = ""
    loss: Loss | None = None
    unleased: Text = ""
    peak_bytes: ByteCount = 0
    went_on_from: Count = 0
    samples: Count = 0


class Profiled(Message, tag="profiled", frozen=True):
    """What a job's optimizers train, told once they have made their first steps: tensors, their bytes."""

    epoch: Count
    tensors: Count
    nbytes: ByteCount
    largest_bytes: ByteCount


class Suspended(Message, tag="suspended", frozen=True):
    """State is in the RAM disk, device memory is free. ``stages_s`` holds seconds by stage name.

    ``tensors``: of how many storages it consists; ``route``: how the device was emptied; 0 and empty in
    journals of older versions. ``bound``: why it can only resume on the device that it left; empty: on any.
    ``restartable``: whether another process can go on from the snapshot. ``restartable_later``: whether, if
    not, one can from that of a later boundary.
    """

    epoch: Count
    boundary: Count
    step: Count
    nbytes: ByteCount
    stages_s: Stages
    tensors: Count = 0
    route: Label = ""
    bound: Text = ""
    restartable: bool = False
    restartable_later: bool = False


class Resumed(Message, tag="resumed", frozen=True):
    """State is on the device again and training goes on."""

    epoch: Count
    boundary: Count
    stages_s: Stages


class Overshot(Message, tag="overshot", frozen=True):
    """The rank had already passed ``stop_at``; answered from the I/O thread."""

    epoch: Count
    boundary: Count


class Refused(Message, tag="refused", frozen=True):
    """A suspend or resume failed; the rank is as it was before (``running`` tells which)."""

    epoch: Count
    boundary: Count
    running: bool
    error: Text
    remedy: Text
    retryable: bool


class Bye(Message, tag="bye", frozen=True):
    """The script ended by itself; the process is about to exit."""

    epoch: Count
    boundary: Count
    step: Count


class Welcome(Message, tag="welcome", frozen=True):
    """Answer to Hello. The rank holds still until a Resume grants it a lease."""

    version: Count


class Suspend(Message, tag="suspend", frozen=True, omit_defaults=True):
    """Stop at boundary ``stop_at`` (or answer Overshot). A larger ``stop_at`` replaces a smaller one.

    ``ending``: the job is told to end, so the stop is called off until its script has saved.
    """

    epoch: Count
    stop_at: StopAt
    ending: bool = False


class Resume(Message, tag="resume", frozen=True, omit_defaults=True):
    """A new lease: bring the state back to ``device`` and go on.

    ``width``: of an elastic job, how many ranks train, the first ones; ``world``: the epoch since when these.
    """

    epoch: Count
    device: Label
    width: OptionalRankCount = 0
    world: Count = 0


class Dismiss(Message, tag="dismiss", frozen=True):
    """The job is through without you, a rank that waits: end well."""

    epoch: Count


class Withdraw(Message, tag="withdraw", frozen=True):
    """Answer Withdrawn if you have nothing on the device; you are no rank then, until you train."""

    epoch: Count


class Withdrawn(Message, tag="withdrawn", frozen=True):
    """The process has nothing on its device, and will say Hello before that changes."""

    epoch: Count


class Queued(Message, tag="queued", frozen=True):
    """Process ``behind`` of the job is this rank: hold still until that has ended."""

    behind: Pid


class Beside(Message, tag="beside", frozen=True):
    """Process ``behind`` of the job is this rank and trains: run on beside it, without orders of your own."""

    behind: Pid


class Rejected(Message, tag="rejected", frozen=True):
    """Your last message was not accepted, and why. Nothing was changed by it."""

    error: Text
    remedy: Text


class Replaced(Message, tag="replaced", frozen=True):
    """Another process of the job is this rank now: say nothing more, and expect no orders."""


FromAgent = Hello | Progress | Profiled | Suspended | Resumed | Overshot | Refused | Withdrawn | Bye
ToAgent = Welcome | Suspend | Resume | Dismiss | Withdraw | Queued | Beside | Rejected | Replaced

_encoder = msgspec.msgpack.Encoder()
_from_agent = msgspec.msgpack.Decoder(FromAgent)
_to_agent = msgspec.msgpack.Decoder(ToAgent)

_M = TypeVar("_M")


def encode(message: FromAgent | ToAgent) -> bytes:
    """Encode one message.

    Raises
    ------
    LocalProtocolError
        If it would exceed ``MAX_MESSAGE_BYTES``.
    """
    frame = _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(f"a {type(message).__name__} message of {len(frame)} bytes is too long")
    return frame


def decode_from_agent(frame: bytes) -> FromAgent:
    """Decode what an agent sent; raises ``RemoteProtocolError`` for anything but a valid message."""
    return cast(FromAgent, _decode(_from_agent, frame))


def decode_to_agent(frame: bytes) -> ToAgent:
    """Decode what the scheduler sent; raises ``RemoteProtocolError`` for anything but a valid message."""
    return cast(ToAgent, _decode(_to_agent, frame))


def _decode(decoder: msgspec.msgpack.Decoder[_M], frame: bytes) -> _M:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a frame of {len(frame)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return decode_frame(decoder, frame, f"a message of protocol version {PROTOCOL_VERSION}")


def decode_frame(decoder: msgspec.msgpack.Decoder[_M], frame: bytes, what: str) -> _M:
    """Decode one frame, ``what`` with its article; raises ``RemoteProtocolError`` if it is no such thing."""
    try:
        return decoder.decode(frame)
    except NOT_A_VALUE as error:
        raise RemoteProtocolError(f"not {what}: {error}") from error
