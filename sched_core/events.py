"""What can happen to the core and what it may ask of its shell: msgspec structs, so that both can be written
down and replayed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpuslice.wire import FromAgent, ToAgent

from .job import JobSpec
from .policy import Task

#: What details of a notice may be.
Plain = int | float | str | bool | None


class Program(msgspec.Struct, frozen=True):
    """How a job's processes are started; the core only hands it on.

    Attributes
    ----------
    argv
        The command and its arguments; no shell is involved.
    directory
        Working directory.
    environ
        All of its environment; the scheduler adds its socket and the job's name.
    """

    argv: tuple[str, ...]
    directory: str
    environ: dict[str, str] = {}


class Submitted(msgspec.Struct, frozen=True, tag="submitted"):
    """Somebody handed in a job."""

    spec: JobSpec
    program: Program


class Reported(msgspec.Struct, frozen=True, tag="reported"):
    """A rank said something."""

    job: str
    rank: int
    message: FromAgent


class RankGone(msgspec.Struct, frozen=True, tag="rank_gone"):
    """The process of a rank no longer exists.

    ``unseen``: it went while no scheduler looked, so its ``Bye`` may be lost; whether that was a failure,
    the job's exit code tells.
    """

    job: str
    rank: int
    unseen: bool = False


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """The command that the shell started for a job ended.

    ``code`` is negative for a signal; ``said`` are lines of its stderr that tell why it failed.
    """

    job: str
    code: int
    said: str = ""


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    """Its owner gave the job up."""

    job: str
    reason: str


class Held(msgspec.Struct, frozen=True, tag="held"):
    """Its owner wants the job off its devices until it is ``Released``."""

    job: str


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Its owner lets a held job take part again."""

    job: str


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """Its owner wants the job on ``devices`` (names, rank order) for its present or its next lease."""

    job: str
    devices: tuple[str, ...]


class Weighted(msgspec.Struct, frozen=True, tag="weighted"):
    """Its owner gives the job another weight."""

    job: str
    weight: float


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    """Something the core had to say (``Notice``); changes nothing, is kept for people."""

    what: str
    job: str = ""
    details: Mapping[str, Plain] = {}


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    """The answer to ``Compute`` number ``number``, or why there is none."""

    number: int
    answer: bytes = b""
    error: str = ""


class Woken(msgspec.Struct, frozen=True, tag="woken"):
    """The moment of the last ``WakeAt`` has come."""


#: What a job's owner asks for.
Owned = Cancelled | Held | Released | Moved | Weighted
Event = Submitted | Reported | RankGone | Exited | Owned | Noted | Computed | Woken


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """Start the processes of ``job``; they will say Hello and hold still. ``attempt`` counts from 0."""

    job: str
    program: Program
    attempt: int = 0


class Tell(msgspec.Struct, frozen=True, tag="tell"):
    """Send ``message`` to a rank."""

    job: str
    rank: int
    message: ToAgent


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """End every process of ``job``."""

    job: str
    reason: str


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
