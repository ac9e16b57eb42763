"""What can happen to the core and what it may ask of its shell: msgspec structs, so that both can be written
down and replayed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpuslice.errors import UsageError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.policy import Task
from gpuslice.types import (
    Count,
    ExitCode,
    JobName,
    Label,
    Pid,
    RankNumber,
    Seconds,
    Text,
    Weight,
    explain,
)
from gpuslice.wire import NOT_A_VALUE, FromAgent, ToAgent

#: What details of a notice may be.
Plain = int | float | str | bool | None


class Submitted(msgspec.Struct, frozen=True, tag="submitted"):
    """Somebody handed in a job."""

    spec: JobSpec
    program: Program


class Reported(msgspec.Struct, frozen=True, tag="reported"):
    """A rank said something."""

    job: JobName
    rank: RankNumber
    message: FromAgent


class RankGone(msgspec.Struct, frozen=True, tag="rank_gone"):
    """The process of a rank, ``pid``, no longer exists; 0 in journals of older versions: the present one.

    ``unseen``: it went while no scheduler looked, or before it had greeted the next one, so its ``Bye`` may
    be lost; whether that was a failure, the job's exit code tells.
    """

    job: JobName
    rank: RankNumber
    unseen: bool = False
    pid: Pid = 0


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """The command that the shell started for a job ended.

    ``code`` is negative for a signal; ``said`` are lines of its stderr that tell why it failed.
    """

    job: JobName
    code: ExitCode
    said: Text = ""


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    """Its owner gave the job up."""

    job: JobName
    reason: Text


class Held(msgspec.Struct, frozen=True, tag="held"):
    """Its owner wants the job off its devices until it is ``Released``."""

    job: JobName


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Its owner lets a held job take part again."""

    job: JobName


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """Its owner wants the job on ``devices`` (names, rank order) for its present or its next lease."""

    job: JobName
    devices: tuple[Label, ...]


class Weighted(msgspec.Struct, frozen=True, tag="weighted"):
    """Its owner gives the job another weight."""

    job: JobName
    weight: Weight


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """How fast ``job`` trained for some seconds beside others (their names with commas; empty: alone).

    ``busy`` is the share of its device that it used, if that is known; ``devices`` how many it had, and
    ``samples`` what it has trained on, if it counts them; 0: not known.
    """

    job: JobName
    beside: Text
    steps: Count
    seconds: Seconds
    busy: Seconds | None = None
    devices: Count = 0
    samples: Count = 0


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    """Something the core had to say (``Notice``); changes nothing, is kept for people.

    But for ``state_waits``: the state of a job cannot be brought now to where its processes are to be.
    """

    what: str
    job: str = ""
    details: Mapping[str, Plain] = {}


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    """The answer to ``Compute`` number ``number``, or why there is none."""

    number: Count
    answer: bytes = b""
    error: str = ""


class Limited(msgspec.Struct, frozen=True, tag="limited"):
    """At most ``prestart`` jobs are to be started beyond those that run."""

    prestart: Count


class NodeLost(msgspec.Struct, frozen=True, tag="node_lost"):
    """Nothing has been heard of a node for so long that its processes count as gone, and its devices."""

    node: Label


class NodeFound(msgspec.Struct, frozen=True, tag="node_found"):
    """A node that was lost is there again, and nothing runs on it."""

    node: Label


class Woken(msgspec.Struct, frozen=True, tag="woken"):
    """The moment of the last ``WakeAt`` has come."""


#: What a job's owner asks for.
OwnerRequest = Cancelled | Held | Released | Moved | Weighted
Event = (
    Submitted
    | Reported
    | RankGone
    | Exited
    | OwnerRequest
    | Measured
    | Noted
    | Computed
    | Limited
    | NodeLost
    | NodeFound
    | Woken
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(event: Event) -> bytes:
    """``event`` as the journal keeps it.

    Raises
    ------
    UsageError
        If a value in it is none that an event may have: the journal could not be replayed.
    """
    try:
        written = _encoder.encode(event)
        _decoder.decode(written)
    except (OverflowError, UnicodeEncodeError, TypeError, *NOT_A_VALUE) as error:
        raise UsageError(f"{type(event).__name__} is not possible: {explain(error)}") from error
    return written


def named(event: Event) -> str:
    """What to call ``event`` for people: its kind, and the rank's message or the note that it is about."""
    if isinstance(event, Noted):
        return event.what
    return str((event.message if isinstance(event, Reported) else event).__struct_config__.tag)


def job_of(event: Event) -> str:
    """The job that ``event`` is about; empty: none."""
    return event.spec.id if isinstance(event, Submitted) else str(getattr(event, "job", ""))


def decode(written: bytes) -> Event:
    """What ``encode`` wrote; one of ``wire.NOT_A_VALUE`` for anything else."""
    return _decoder.decode(written)


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """Start the processes of ``job``, whose turn is near; they will say Hello and hold still.

    ``attempt`` counts from 0. ``nodes``: where, rank order; empty: here. ``origin``: where its state is, if
    that is elsewhere.
    """

    job: str
    program: Program
    attempt: int = 0
    nodes: tuple[str, ...] = ()
    origin: tuple[str, ...] = ()


class Tell(msgspec.Struct, frozen=True, tag="tell"):
    """Send ``message`` to a rank; to process ``pid``, if that is another one than the rank is now."""

    job: str
    rank: int
    message: ToAgent
    pid: int = 0


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """End every process of ``job``, within its grace; ``at_once``: they are killed unasked."""

    job: str
    reason: str
    at_once: bool = False


class WakeAt(msgspec.Struct, frozen=True, tag="wake_at"):
    """Send ``Woken`` at ``when_s``, replacing the last wake time; ``None``: no longer."""

    when_s: float | None


class Compute(msgspec.Struct, frozen=True, tag="compute"):
    """Compute ``task`` beside everything else, and send ``Computed``. There is one at a time."""

    number: int
    task: Task


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """Let people know: to be handed back as ``Noted``, so that it is in the journal in its place."""

    what: str
    job: str = ""
    details: Mapping[str, Plain] = {}


Command = Launch | Tell | Kill | WakeAt | Compute | Notice
