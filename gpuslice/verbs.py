"""What a user's shell says to the scheduler, and what it is answered: two tagged unions, decoded strictly.

A request is two frames, the protocol's version and the body (msgpack); so is the answer. Every request gets
one answer; that to ``Wait`` and ``Down`` comes when what they wait for has happened.
"""

from __future__ import annotations

from typing import cast

import msgspec

from gpuslice.errors import RemoteProtocolError
from gpuslice.job_request import JobRequest
from gpuslice.types import (
    ByteCount,
    Count,
    JobName,
    Label,
    Word,
)
from gpuslice.types import Weight as WeightValue
from gpuslice.wire import MAX_MESSAGE_BYTES, decode_frame

VERSION = b"1"


class Verb(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of requests and answers."""


class Submit(JobRequest, tag="submit", frozen=True, kw_only=True):
    """Start a job when its turn comes.

    Attributes
    ----------
    stem
        What its id begins with if it has no ``name``; a number is added that makes it unique.
    argv
        The command, which is started in ``directory`` with ``environ``; no shell is involved.
    relaunch
        Its command starts as many ranks as it is told; it is started anew for another number of devices.
    """

    stem: JobName
    argv: tuple[Word, ...]
    relaunch: bool = False


class Status(Verb, tag="status", frozen=True):
    """What is there and how it stands; of the jobs, some at a time, those that follow the first ``after``."""

    after: Count = 0


class Wait(Verb, tag="wait", frozen=True):
    """Answer when the job has ended; to be asked again every two seconds, as who has gone is forgotten."""

    job: JobName


class Admission(Verb, tag="admission", frozen=True):
    """Answer when it is decided whether the job's deadline is guaranteed: ``Done``, if refused ``Failed``."""

    job: JobName


class Cancel(Verb, tag="cancel", frozen=True):
    """End the job."""

    job: JobName


class Suspend(Verb, tag="suspend", frozen=True):
    """Keep the job off the devices until ``Resume``."""

    job: JobName


class Resume(Verb, tag="resume", frozen=True):
    """Let a suspended job take part again."""

    job: JobName


class Migrate(Verb, tag="migrate", frozen=True):
    """Run the job on ``devices`` (names, rank order), now or when its turn comes."""

    job: JobName
    devices: tuple[Label, ...]


class Weight(Verb, tag="weight", frozen=True):
    """Give the job another weight."""

    job: JobName
    weight: WeightValue


class Logs(Verb, tag="logs", frozen=True):
    """Where the job's output is."""

    job: JobName


class ReadLog(Verb, tag="read_log", frozen=True):
    """The job's output from byte ``offset`` on, or (``err``) what it wrote to stderr; some at a time."""

    job: JobName
    err: bool = False
    offset: ByteCount = 0


class Events(Verb, tag="events", frozen=True):
    """What happened after event ``after`` (0: from the beginning), the oldest first, some at a time."""

    after: Count = 0


class Down(Verb, tag="down", frozen=True):
    """Take no more jobs, cancel those there are (``drain``: let them finish), then leave."""

    drain: bool = False


class SliceInfo(Verb, frozen=True):
    """Devices a job had, from one moment of the scheduler's clock to another (``None``: still)."""

    devices: tuple[str, ...]
    since_s: float
    until_s: float | None


class JobInfo(Verb, frozen=True):
    """One job, as ``ps --json`` prints it; the keys are documented in docs/json.md and stay."""

    id: str
    state: str
    held: bool
    devices: tuple[str, ...]
    moving_to: tuple[str, ...]
    demand: int
    tenant: str
    weight: float
    memory_bytes: int | None
    level: int | None
    steps: int
    total_steps: int | None
    steps_per_s: float | None
    executed_s: float
    service_s: float
    setup_s: float
    age_s: float
    eta_s: float | None
    deadline_s: float | None
    deadline_missed: bool | None
    guaranteed: bool | None
    waited_s: float
    fair_share_delay_s: float
    fragmentation_delay_s: float
    slices: int
    suspends: int
    migrations: int
    switches: int
    blackout_s: float
    blackout_mean_s: float | None
    recent: tuple[SliceInfo, ...]
    switch_predicted_s: float | None
    switch_s: float | None
    missed_boundaries: int
    stuck: str | None
    trial: str | None
    restarts: int
    max_restarts: int
    exit_code: int | None
    failure: str | None
    reason: str
    command: tuple[str, ...]
    started: bool = True
    skew: float | None = None
    unleased: str | None = None
    shares_with: tuple[str, ...] = ()
    slowdown: float | None = None
    slowdown_interval: tuple[float, float] | None = None
    peak_bytes: int | None = None
    most_devices: int | None = None
    processes: str | None = None
    held_s: float = 0.0
    switching_s: float = 0.0
    why: str | None = None

    @property
    def ended(self) -> bool:
        """Whether it succeeded, failed or was cancelled."""
        return self.state in ("succeeded", "failed", "cancelled")


class DeviceInfo(Verb, frozen=True):
    """One device and the jobs on it."""

    name: str
    jobs: tuple[str, ...]


class Accepted(Verb, tag="accepted", frozen=True):
    """The job has been accepted under this id."""

    job: str


class SchedulerStatus(Verb, tag="standing", frozen=True):
    """The scheduler, its devices and jobs, in order of submission; ``job_count`` is that of all."""

    pid: int
    policy: str
    now_s: float
    devices: tuple[DeviceInfo, ...]
    jobs: tuple[JobInfo, ...]
    job_count: int
    endpoints: tuple[str, ...]


class Ended(Verb, tag="ended", frozen=True):
    """The job has ended, and nothing of it is left on a device."""

    job: JobInfo


class EventInfo(Verb, frozen=True):
    """One entry of the journal, as ``events --json`` prints it; documented in docs/json.md."""

    number: int
    at_s: float
    what: str
    job: str
    rank: int | None
    details: dict[str, int | float | str | bool | None]
    unix_s: float | None = None


class History(Verb, tag="history", frozen=True):
    """Events, and the number to ask on from: if that is what was asked from, these are all."""

    events: tuple[EventInfo, ...]
    after: int


class LogFiles(Verb, tag="log_files", frozen=True):
    """The job's output, as paths."""

    out: str
    err: str


class LogPart(Verb, tag="log_part", frozen=True):
    """Part of the job's output; empty at what is its end for now."""

    data: bytes


class Done(Verb, tag="done", frozen=True):
    """It has been done."""


class Failed(Verb, tag="failed", frozen=True):
    """It has not been done, nothing was changed; ``exit_code`` is for the command line."""

    error: str
    remedy: str
    exit_code: int


Request = (
    Submit
    | Admission
    | Status
    | Wait
    | Cancel
    | Suspend
    | Resume
    | Migrate
    | Weight
    | Logs
    | ReadLog
    | Events
    | Down
)
Answer = Accepted | SchedulerStatus | Ended | History | LogFiles | LogPart | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> list[bytes]:
    """The frames of ``message``."""
    return [VERSION, _encoder.encode(message)]


def decode_request(frames: list[bytes]) -> Request:
    """Decode what a client sent; ``RemoteProtocolError`` for anything but a request of our version."""
    return cast(Request, decode_frame(_requests, _body(frames), "a request"))


def decode_answer(frames: list[bytes]) -> Answer:
    """Decode what the scheduler answered; ``RemoteProtocolError`` for anything but an answer."""
    return cast(Answer, decode_frame(_answers, _body(frames), "an answer"))


def _body(frames: list[bytes]) -> bytes:
    if len(frames) != 2:
        raise RemoteProtocolError(f"a message of {len(frames)} frames", "send version and body")
    version, body = frames
    if version != VERSION:
        raise RemoteProtocolError(
            f"protocol version {version[:8]!r} is not {VERSION!r}", "run the same gpuslice on both sides"
        )
    if len(body) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message of {len(body)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return body
