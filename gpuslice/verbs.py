"""The messages between a user's shell and the scheduler: requests and answers, decoded strictly.

A request is two frames, the protocol's version and the body (msgpack). So is the answer. Every request gets
one answer. ``Wait``, ``Admission`` and ``Down`` are answered when the event that they wait for has happened.
"""

from __future__ import annotations

from typing import cast

import msgspec

from gpuslice.errors import RemoteProtocolError
from gpuslice.job_request import ArrayRequest, JobRequest
from gpuslice.types import (
    ByteCount,
    Count,
    JobName,
    Label,
    Pid,
    Priority,
    Seconds,
    UnixTime,
    Word,
)
from gpuslice.types import Weight as WeightValue
from gpuslice.wire import MAX_MESSAGE_BYTES, decode_frame

VERSION = b"1"


class Verb(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of requests and answers."""


class Submit(JobRequest, tag="submit", frozen=True, kw_only=True):
    """A request to start a job when its turn comes.

    Attributes
    ----------
    stem
        The beginning of the job's id if it has no ``name``. A number is added to make the id unique.
    argv
        The command, which is started in ``directory`` with ``environ``, without a shell.
    relaunch
        True if the command is told how many ranks to start, and is started again when that number changes.
    """

    stem: JobName
    argv: tuple[Word, ...]
    relaunch: bool = False


class SubmitArray(ArrayRequest, tag="submit_array", frozen=True, kw_only=True):
    """A request to start many jobs of one command, all or none: the other fields are those of ``Submit``."""

    stem: JobName
    argv: tuple[Word, ...]
    relaunch: bool = False


class Status(Verb, tag="status", frozen=True):
    """A request for the scheduler's state, with a part of the jobs: those that follow the first ``after``.

    With ``fold`` the jobs of arrays do not count: ``arrays`` has what is needed of them.
    """

    after: Count = 0
    fold: bool = False


class Wait(Verb, tag="wait", frozen=True):
    """A request to be answered when the job has ended.

    It has to be repeated every two seconds: the scheduler forgets clients that are silent.
    """

    job: JobName


class Admission(Verb, tag="admission", frozen=True):
    """A request to be told, once decided, if the job's deadline is guaranteed: ``Done``, else ``Failed``."""

    job: JobName


class Cancel(Verb, tag="cancel", frozen=True):
    """A request to end the job."""

    job: JobName


class Suspend(Verb, tag="suspend", frozen=True):
    """A request to keep the job off the devices until ``Resume``."""

    job: JobName


class Resume(Verb, tag="resume", frozen=True):
    """A request to let a suspended job have devices again."""

    job: JobName


class Adjust(Verb, tag="adjust", frozen=True):
    """A request to change what was asked for a job; None: it stays."""

    job: JobName
    weight: WeightValue | None = None
    priority: Priority | None = None
    time_limit_s: Seconds | None = None


class Set(Verb, tag="set", frozen=True):
    """A request to change settings of the scheduler, each KEY=VALUE, all or none. Without any: list them."""

    settings: tuple[Word, ...] = ()


class Requeue(Verb, tag="requeue", frozen=True):
    """A request for another attempt of a job that has ended; ``fresh`` goes on from no snapshot."""

    job: JobName
    fresh: bool = False


class Migrate(Verb, tag="migrate", frozen=True):
    """A request to run the job on ``devices`` (names in rank order), now or when its turn comes."""

    job: JobName
    devices: tuple[Label, ...]


class Weight(Verb, tag="weight", frozen=True):
    """A request to change the job's weight."""

    job: JobName
    weight: WeightValue


class Pause(Verb, tag="pause", frozen=True):
    """A request to close devices to all jobs for so long (None: until ``Unpause``). What is there parks.

    Here and in the next ones ``devices`` are names of devices, or of nodes with all of theirs.
    """

    devices: tuple[Label, ...]
    for_s: Seconds | None = None


class Unpause(Verb, tag="unpause", frozen=True):
    """A request to open paused devices again."""

    devices: tuple[Label, ...]


class Drain(Verb, tag="drain", frozen=True):
    """A request to let no job begin on these devices (none named: on all). Those that have begun go on."""

    devices: tuple[Label, ...] = ()


class Undrain(Verb, tag="undrain", frozen=True):
    """A request to let jobs begin again on these devices (none named: on all that are drained)."""

    devices: tuple[Label, ...] = ()


class Reserve(Verb, tag="reserve", frozen=True):
    """A request to let only jobs of ``user`` have devices, in a time that begins and ends in so many seconds.

    ``user`` is a tenant; empty: the jobs without one.
    """

    devices: tuple[Label, ...]
    begin_in_s: Seconds
    end_in_s: Seconds
    user: Label = ""


class Unreserve(Verb, tag="unreserve", frozen=True):
    """A request to end a reservation, or not to begin it."""

    reservation: JobName


class Logs(Verb, tag="logs", frozen=True):
    """A request for the paths of the job's output."""

    job: JobName


class ReadLog(Verb, tag="read_log", frozen=True):
    """A request for a part of the job's stdout, or of its stderr (``err``), from byte ``offset`` on."""

    job: JobName
    err: bool = False
    offset: ByteCount = 0


class Events(Verb, tag="events", frozen=True):
    """A request for a part of the events after number ``after`` (0: from the beginning), oldest first."""

    after: Count = 0


class Down(Verb, tag="down", frozen=True):
    """A request to accept no more jobs, cancel all, and end the scheduler.

    ``drain``: let them finish first. ``keep``: park all, and move their snapshots to a disk instead.
    """

    drain: bool = False
    keep: bool = False


class CallOff(Verb, tag="call_off", frozen=True):
    """A request to let all jobs go on that are being kept (``Down`` with ``keep``)."""


class SliceInfo(Verb, frozen=True):
    """The devices that a job had, and from when to when by the scheduler's clock (``None``: still)."""

    devices: tuple[str, ...]
    since_s: float
    until_s: float | None


class AttemptInfo(Verb, frozen=True):
    """One attempt of a job, counted from 1: when its command was started and ended (``None``: it has not).

    ``failure`` is the class and the reason of its failure, if it failed.
    """

    number: int
    since_s: float
    until_s: float | None
    exit_code: int | None
    failure: str | None


class EndInfo(Verb, frozen=True):
    """What is done when a job has ended: ``on_end`` or ``notify``, and how far that has come.

    ``state`` is ``waits`` (for the end), ``owed``, ``done`` or ``given up``. ``reason`` says why the last try
    failed. ``again_s`` is in how many seconds it is tried again.
    """

    what: str
    state: str
    tries: int
    reason: str
    again_s: float | None


class StartInfo(Verb, frozen=True):
    """When a job is expected to start: in how many seconds, and from what that follows.

    ``bound`` is ``not before``, ``about`` or ``at the latest``.
    """

    in_s: float
    bound: str
    reason: str


class JobInfo(Verb, frozen=True):
    """One job, as ``ps --json`` prints it. The keys are documented in docs/json.md and do not change."""

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
    not_moved: str | None = None
    array: str | None = None
    attempts: tuple[AttemptInfo, ...] = ()
    directory: str = ""
    copy_on: str | None = None
    copy_age_s: float | None = None
    state_arrived_bytes: int | None = None
    state_bytes: int | None = None
    priority: int = 0
    time_limit_s: float | None = None
    begin_unix_s: float | None = None
    after: tuple[str, ...] = ()
    at_end: tuple[EndInfo, ...] = ()
    start: StartInfo | None = None

    @property
    def ended(self) -> bool:
        """True if the job succeeded, failed or was cancelled."""
        return self.state in ("succeeded", "failed", "cancelled")


class ArrayInfo(Verb, frozen=True):
    """All jobs of one array: their devices, and how many are in which state.

    ``place`` is how many jobs that are of no array were submitted before it.
    """

    id: str
    tenant: str
    devices: tuple[str, ...]
    executed_s: float
    states: dict[str, int]
    place: int


class DeviceUser(Verb, frozen=True):
    """A process on a device that belongs to no job, and since when it has been seen there (docs/json.md).

    ``user`` is its Unix user, or ``u1003`` for a number without a name. ``nbytes`` is its memory on the
    device; None if the driver does not tell.
    """

    pid: Pid
    user: Word
    command: Word
    nbytes: ByteCount | None
    since_unix_s: UnixTime


class DeviceInfo(Verb, frozen=True):
    """One device, the jobs on it, and to whom it is closed (docs/json.md)."""

    name: str
    jobs: tuple[str, ...]
    paused: bool = False
    paused_until_unix_s: float | None = None
    drained: bool = False
    reserved_for: str | None = None
    reserved_until_unix_s: float | None = None
    used_by: tuple[DeviceUser, ...] = ()
    removed: bool = False


class ReservationInfo(Verb, frozen=True):
    """One reservation, as ``reserve --list --json`` prints it (docs/json.md)."""

    id: str
    devices: tuple[str, ...]
    begin_unix_s: float
    end_unix_s: float
    user: str
    active: bool


class SettingInfo(Verb, frozen=True):
    """A setting of the scheduler by its name in ``gpuslice set``, which has ``changed`` it or not."""

    name: str
    value: str
    changed: bool = False


class NodeInfo(Verb, frozen=True):
    """One node, as ``nodes --json`` prints it (docs/json.md)."""

    name: str
    devices: tuple[str, ...]
    state: str
    jobs: tuple[str, ...] = ()
    heard_s: float | None = None
    version: str | None = None
    ramdisk_free_bytes: int | None = None
    clock_s: float | None = None
    reason: str = ""
    remedy: str = ""


class Accepted(Verb, tag="accepted", frozen=True):
    """The answer that the job has been accepted under this id."""

    job: str


class AcceptedArray(Verb, tag="accepted_array", frozen=True):
    """The answer that all jobs of the array have been accepted under these ids."""

    array: str
    jobs: tuple[str, ...]


class SchedulerStatus(Verb, tag="standing", frozen=True):
    """The scheduler, its devices, and a part of its ``job_count`` jobs in order of submission."""

    pid: int
    policy: str
    now_s: float
    devices: tuple[DeviceInfo, ...]
    jobs: tuple[JobInfo, ...]
    job_count: int
    endpoints: tuple[str, ...]
    nodes: tuple[NodeInfo, ...] = ()
    arrays: tuple[ArrayInfo, ...] = ()
    reservations: tuple[ReservationInfo, ...] = ()


class Ended(Verb, tag="ended", frozen=True):
    """The answer that the job has ended, and nothing of it is left on a device."""

    job: JobInfo


class EventInfo(Verb, frozen=True):
    """One entry of the journal, as ``events --json`` prints it (docs/json.md)."""

    number: int
    at_s: float
    what: str
    job: str
    rank: int | None
    details: dict[str, int | float | str | bool | None]
    unix_s: float | None = None


class History(Verb, tag="history", frozen=True):
    """A part of the events, and the number to ask from next. If that has not changed, there are no more."""

    events: tuple[EventInfo, ...]
    after: int


class LogFiles(Verb, tag="log_files", frozen=True):
    """The paths of the job's stdout and stderr, and how long they are now."""

    out: str
    err: str
    out_bytes: int = 0
    err_bytes: int = 0


class LogPart(Verb, tag="log_part", frozen=True):
    """A part of the job's output; empty at its present end."""

    data: bytes


class Moving(Verb, tag="moving", frozen=True):
    """The answer that the job goes ``to`` these devices, now or when its turn comes.

    ``nbytes`` of state go with it, and it is expected to stand still for ``expected_s``; None: not known.
    """

    job: str
    present: tuple[str, ...]
    to: tuple[str, ...]
    nbytes: int | None
    expected_s: float | None


class DevicesChanged(Verb, tag="devices_changed", frozen=True):
    """The answer that a request about devices has been carried out, with the devices that it was about.

    ``until_unix_s`` is the end of a pause, if it has one.
    """

    devices: tuple[str, ...]
    until_unix_s: float | None = None
    reservation: ReservationInfo | None = None


class Settings(Verb, tag="settings", frozen=True):
    """The answer with all settings of the scheduler as they are now."""

    settings: tuple[SettingInfo, ...]


class Done(Verb, tag="done", frozen=True):
    """The answer that the request has been carried out."""


class Failed(Verb, tag="failed", frozen=True):
    """The answer that the request failed and changed nothing. The command line exits with ``exit_code``."""

    error: str
    remedy: str
    exit_code: int


#: The requests that are about devices.
DeviceVerb = Pause | Unpause | Drain | Undrain | Reserve | Unreserve
Request = (
    Submit
    | SubmitArray
    | DeviceVerb
    | Admission
    | Status
    | Wait
    | Cancel
    | Suspend
    | Resume
    | Requeue
    | Adjust
    | Set
    | Migrate
    | Weight
    | Logs
    | ReadLog
    | Events
    | Down
    | CallOff
)
Answer = (
    Accepted
    | AcceptedArray
    | SchedulerStatus
    | Ended
    | History
    | LogFiles
    | LogPart
    | Moving
    | DevicesChanged
    | Settings
    | Done
    | Failed
)

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> list[bytes]:
    """Return the two frames of ``message``."""
    return [VERSION, _encoder.encode(message)]


def decode_request(frames: list[bytes]) -> Request:
    """Return the request in a client's frames. Raise ``RemoteProtocolError`` if they hold none."""
    return cast(Request, decode_frame(_requests, _body(frames), "a request"))


def decode_answer(frames: list[bytes]) -> Answer:
    """Return the answer in the scheduler's frames. Raise ``RemoteProtocolError`` if they hold none."""
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
