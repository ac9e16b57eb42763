"""The messages between a job's agents and the scheduler: small tagged structs, one union per direction.

Each message is one ZeroMQ frame of msgpack, at most ``MAX_MESSAGE_BYTES``. ``decode_*`` raises
``RemoteProtocolError`` for all bytes that are not exactly one of the messages, with each value within its
range (``types``). Tensors are never sent over this socket.
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
#: Errors that msgspec raises for bytes that are no valid message. Text that is not UTF-8 has its own error.
NOT_A_VALUE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages."""


class Hello(Message, tag="hello", frozen=True, omit_defaults=True):
    """A rank's first message on every connection. It tells a restarted scheduler the rank's state.

    ``boundary`` and ``epoch`` are 0 in a fresh process. ``parked``: the rank waits for a lease.
    ``replaces``: the process that has been this rank so far, if this process trains in its place.
    ``attempt``: the attempt of the job that started this process; None if an older version did.
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
    attempt: Count | None = None


class Progress(Message, tag="progress", frozen=True, omit_defaults=True):
    """A rank's progress: mini-batch boundaries passed, optimizer steps done. Also the heartbeat.

    ``stuck``: where the script is, if it has passed no boundary for too long.
    ``loss``: the newest training loss that the script reported, if any.
    ``unleased``: memory that the rank holds on GPUs of which it has no lease. ``peak_bytes``: the most memory
    that it has used on its device while it trained; 0 before its first steps, and where that is not known.
    ``went_on_from``: the boundary of a former process's snapshot from which the rank has gone on, if any.
    ``samples``: number of samples that all ranks of an elastic job have trained on; 0: not known.
    ``saved``: the boundary of the newest checkpoint that the process has saved while it trained; 0: none.
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
    saved: Count = 0


class Profiled(Message, tag="profiled", frozen=True):
    """The tensors that a job's optimizers train, and their bytes. Sent after the optimizers' first steps."""

    epoch: Count
    tensors: Count
    nbytes: ByteCount
    largest_bytes: ByteCount


class Suspended(Message, tag="suspended", frozen=True):
    """A report that the state is in the RAM disk and device memory is free. ``stages_s``: seconds by stage.

    ``tensors``: number of storages in the state. ``route``: how the device was emptied. Journals of older
    versions have 0 and an empty text. ``bound``: why the job can only resume on the device that it left;
    empty if it can resume on any. ``restartable``: True if another process can go on from the snapshot.
    ``restartable_later``: True if that is not so, but will be at a later boundary.
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
    """A report that the state is on the device again and training goes on."""

    epoch: Count
    boundary: Count
    stages_s: Stages


class Overshot(Message, tag="overshot", frozen=True):
    """The answer to a Suspend that the rank has already passed ``stop_at`` or cannot park there."""

    epoch: Count
    boundary: Count


class Refused(Message, tag="refused", frozen=True):
    """A report that a suspend (``running``) or a resume failed. The rank is as it was before."""

    epoch: Count
    boundary: Count
    running: bool
    error: Text
    remedy: Text
    retryable: bool


class Bye(Message, tag="bye", frozen=True):
    """A report that the script has ended by itself and the process is about to exit."""

    epoch: Count
    boundary: Count
    step: Count


class Welcome(Message, tag="welcome", frozen=True):
    """The answer to Hello. The rank waits until a Resume grants it a lease."""

    version: Count


class Suspend(Message, tag="suspend", frozen=True, omit_defaults=True):
    """An order to stop at boundary ``stop_at`` or answer Overshot. A larger ``stop_at`` replaces a smaller.

    ``ending``: the job is told to end, so the stop is called off until its script has saved.
    ``for_restart``: another process is to go on from the snapshot.
    """

    epoch: Count
    stop_at: StopAt
    ending: bool = False
    for_restart: bool = False


class Resume(Message, tag="resume", frozen=True, omit_defaults=True):
    """A new lease: an order to bring the state back to ``device`` and go on.

    ``width``: how many ranks of an elastic job train; they are the first ones. ``world``: the epoch since
    which these ranks train.
    """

    epoch: Count
    device: Label
    width: OptionalRankCount = 0
    world: Count = 0


class Dismiss(Message, tag="dismiss", frozen=True):
    """An order to a rank that waits to end as a success: the job has ended without it."""

    epoch: Count


class Withdraw(Message, tag="withdraw", frozen=True):
    """An order to give the lease up and answer Withdrawn, if the process has nothing on the device."""

    epoch: Count


class Withdrawn(Message, tag="withdrawn", frozen=True):
    """The answer that the process has nothing on its device, and will say Hello before that changes."""

    epoch: Count


class Queued(Message, tag="queued", frozen=True):
    """An order to wait until process ``behind`` of the job, which is this rank, has ended."""

    behind: Pid


class Beside(Message, tag="beside", frozen=True):
    """An order to run without a lease: process ``behind`` of the job is this rank and trains."""

    behind: Pid


class Rejected(Message, tag="rejected", frozen=True):
    """The answer that the last message was not accepted, and why. The message changed nothing."""

    error: Text
    remedy: Text


class Replaced(Message, tag="replaced", frozen=True):
    """An order to send nothing more and expect no orders: another process of the job is this rank now."""


FromAgent = Hello | Progress | Profiled | Suspended | Resumed | Overshot | Refused | Withdrawn | Bye
ToAgent = Welcome | Suspend | Resume | Dismiss | Withdraw | Queued | Beside | Rejected | Replaced

_encoder = msgspec.msgpack.Encoder()
_from_agent = msgspec.msgpack.Decoder(FromAgent)
_to_agent = msgspec.msgpack.Decoder(ToAgent)

_M = TypeVar("_M")


def encode(message: FromAgent | ToAgent) -> bytes:
    """Return the frame of one message.

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
    """Return the message in an agent's frame. Raise ``RemoteProtocolError`` if it holds no valid one."""
    return cast(FromAgent, _decode(_from_agent, frame))


def decode_to_agent(frame: bytes) -> ToAgent:
    """Return the message in a scheduler's frame. Raise ``RemoteProtocolError`` if it holds no valid one."""
    return cast(ToAgent, _decode(_to_agent, frame))


def _decode(decoder: msgspec.msgpack.Decoder[_M], frame: bytes) -> _M:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a frame of {len(frame)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return decode_frame(decoder, frame, f"a message of protocol version {PROTOCOL_VERSION}")


def decode_frame(decoder: msgspec.msgpack.Decoder[_M], frame: bytes, what: str) -> _M:
    """Return the value in one frame. Raise ``RemoteProtocolError``, naming ``what``, if it holds none."""
    try:
        return decoder.decode(frame)
    except NOT_A_VALUE as error:
        raise RemoteProtocolError(f"not {what}: {error}") from error
