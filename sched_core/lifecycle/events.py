"""The events that the core takes, and the commands that it returns to its shell.

Both are msgspec structs, so that they can be written down and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from gpuslice.errors import UsageError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.command import Purpose
from gpuslice.sched_core.jobs.facts import Keep
from gpuslice.sched_core.jobs.kept import KeptJobs
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.policy import Task
from gpuslice.types import (
    Count,
    ExitCode,
    JobName,
    Label,
    Pid,
    PortNumber,
    Priority,
    RankNumber,
    Seconds,
    Text,
    UnixTime,
    VariableName,
    Weight,
    Word,
    explain,
)
from gpuslice.verbs import DeviceUser
from gpuslice.wire import NOT_A_VALUE, FromAgent, ToAgent

#: The types that a value in a notice's details may have.
Plain = int | float | str | bool | None


class Submitted(msgspec.Struct, frozen=True, tag="submitted"):
    """The submission of a job."""

    spec: JobSpec
    program: Program


class Point(msgspec.Struct, frozen=True):
    """One job of an array: its id, its command, and its variables besides those that all have."""

    id: JobName
    argv: tuple[Word, ...]
    environ: dict[VariableName, Word] = {}


class ArraySubmitted(msgspec.Struct, frozen=True, tag="array_submitted"):
    """The submission of all jobs of an array at once: all or none.

    ``spec`` and ``program`` are those of each job, but for what its point says. The id of ``spec`` is the
    array's.
    """

    spec: JobSpec
    program: Program
    points: tuple[Point, ...]


class Reported(msgspec.Struct, frozen=True, tag="reported"):
    """A message from a rank."""

    job: JobName
    rank: RankNumber
    message: FromAgent


class RankGone(msgspec.Struct, frozen=True, tag="rank_gone"):
    """The end of the process ``pid`` of a rank, in ``attempt`` of its job.

    Journals of older versions have pid 0 (the present process) and attempt None (the present attempt).

    ``unseen``: it ended while no scheduler watched, or before it had greeted the next scheduler, so its
    ``Bye`` may be lost. The job's exit code then tells whether that was a failure.
    """

    job: JobName
    rank: RankNumber
    unseen: bool = False
    pid: Pid = 0
    attempt: Count | None = None


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """The end of the command that the shell started for ``attempt`` of a job.

    ``code`` is negative for a signal. ``said`` are lines of its stderr that tell why it failed. ``node`` is
    the node on which the command of a gang on several nodes has ended. None: nothing of the command is left.
    Journals of older versions have attempt None: the present attempt.
    """

    job: JobName
    code: ExitCode
    said: Text = ""
    node: Label | None = None
    attempt: Count | None = None


class Brought(msgspec.Struct, frozen=True, tag="brought"):
    """The answer to ``Bring``: the state of a job is where its processes are to be.

    ``error`` says why it could not be brought. ``gone`` is True if no node that can be reached has it.
    """

    job: JobName
    attempt: Count
    error: Text = ""
    gone: bool = False


class StateWaits(msgspec.Struct, frozen=True, tag="state_waits"):
    """The state of a job cannot be brought now, because a node cannot be reached. It is tried again.

    ``to`` are the nodes where the processes of the job are to be.
    """

    job: JobName
    attempt: Count
    to: Text
    reason: Text


class PortFound(msgspec.Struct, frozen=True, tag="port_found"):
    """The answer to ``FindPort``: the port of the first rank's node at which the ranks of a gang meet."""

    job: JobName
    attempt: Count
    port: PortNumber


class WaitsAhead(msgspec.Struct, frozen=True, tag="waits_ahead"):
    """The answer to ``StartAhead``: the process waits to be launched, or it has ended or could not start."""

    job: JobName
    attempt: Count


class NoRoom(msgspec.Struct, frozen=True, tag="no_room"):
    """The nodes whose RAM disk has no room for the state of ``job``, and why; none: all have room."""

    job: JobName
    nodes: dict[Label, Text]


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    """The owner's request to cancel the job."""

    job: JobName
    reason: Text


class Held(msgspec.Struct, frozen=True, tag="held"):
    """The owner's request to keep the job off all devices until it is ``Released``."""

    job: JobName


class Released(msgspec.Struct, frozen=True, tag="released"):
    """The owner's request to schedule a held job again."""

    job: JobName


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """The owner's request to have the job on ``devices`` (names, rank order) in its present or next lease."""

    job: JobName
    devices: tuple[Label, ...]


class Weighted(msgspec.Struct, frozen=True, tag="weighted"):
    """The owner's request to give the job another weight."""

    job: JobName
    weight: Weight


class Kept(msgspec.Struct, frozen=True, tag="keep"):
    """A step of keeping all jobs while no scheduler runs, or only ``job``. None: scheduled again."""

    keep: Keep | None
    job: Label = ""


class TakenOver(msgspec.Struct, frozen=True, tag="taken_over"):
    """The jobs that a scheduler with another journal has kept. No job may have been submitted before.

    ``file`` is the checksum of the file that they come from.
    """

    kept: KeptJobs
    unix_s: UnixTime
    file: Label = ""


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """A measurement of ``job``: its steps in some seconds beside other jobs (ids with commas; empty: alone).

    ``busy`` is the share of its device that the job used; None: not known. ``devices`` is the number of its
    devices, and ``samples`` the number of samples it has trained on; 0: not known.
    """

    job: JobName
    beside: Text
    steps: Count
    seconds: Seconds
    busy: Seconds | None = None
    devices: Count = 0
    samples: Count = 0


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    """A ``Notice`` of the core, kept in the journal for people. It changes nothing."""

    what: str
    job: str = ""
    details: Mapping[str, Plain] = {}


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    """The answer to ``Compute`` number ``number``, or the error if there is no answer."""

    number: Count
    answer: bytes = b""
    error: str = ""


class Limited(msgspec.Struct, frozen=True, tag="limited"):
    """The limit ``prestart`` on jobs that are started beyond those that run."""

    prestart: Count


class NodeSilent(msgspec.Struct, frozen=True, tag="node_silent"):
    """The silence of a node: it gets nothing new. Its processes go on until its lease has run out."""

    node: Label


class NodeLost(msgspec.Struct, frozen=True, tag="node_lost"):
    """The loss of a node: its lease has run out, so none of its processes goes on before it is found."""

    node: Label


class NodeFound(msgspec.Struct, frozen=True, tag="node_found"):
    """The return of a node that was silent or lost.

    ``anew`` is True if its agent has joined anew. Then its ranks greet, and what has ended is told.
    """

    node: Label
    anew: bool = True


class Clocked(msgspec.Struct, frozen=True, tag="clocked"):
    """The Unix time at this moment: another scheduler has begun, or the machine has slept."""

    unix_s: UnixTime


class Paused(msgspec.Struct, frozen=True, tag="paused"):
    """The request to close ``devices`` to all jobs until a Unix time (None: until ``Unpaused``)."""

    devices: tuple[Label, ...]
    unix_s: UnixTime
    until_unix_s: UnixTime | None = None


class Unpaused(msgspec.Struct, frozen=True, tag="unpaused"):
    """The request to end the pauses of ``devices``."""

    devices: tuple[Label, ...]


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """The request to let no job begin on ``devices``. Jobs that are there, or were there last, go on."""

    devices: tuple[Label, ...]


class Undrained(msgspec.Struct, frozen=True, tag="undrained"):
    """The request to let jobs begin on ``devices`` again."""

    devices: tuple[Label, ...]


class Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """The request to let only jobs of ``tenant`` have ``devices`` between two Unix times."""

    reservation: JobName
    devices: tuple[Label, ...]
    unix_s: UnixTime
    begin_unix_s: UnixTime
    end_unix_s: UnixTime
    tenant: Label = ""


class Unreserved(msgspec.Struct, frozen=True, tag="unreserved"):
    """The request to end a reservation, or not to begin it."""

    reservation: JobName


class DevicesUsed(msgspec.Struct, frozen=True, tag="devices_used"):
    """The processes on devices of ``node`` that are none of gpuslice's: all of them, by device.

    No job begins on such a device. ``left`` are those of them that jobs must leave, too.
    """

    node: Label
    unix_s: UnixTime
    users: Mapping[Label, tuple[DeviceUser, ...]]
    left: tuple[Label, ...] = ()


class Woken(msgspec.Struct, frozen=True, tag="woken"):
    """The moment of the last ``WakeAt`` has come."""


class Adjusted(msgspec.Struct, frozen=True, tag="adjusted"):
    """The owner's request to give the job another weight, priority or time limit; None: it keeps its own."""

    job: JobName
    weight: Weight | None = None
    priority: Priority | None = None
    time_limit_s: Seconds | None = None


class Requeued(msgspec.Struct, frozen=True, tag="requeued"):
    """The owner's request for another attempt of a job that has ended.

    It goes on from the job's newest snapshot, or, if ``fresh``, from the beginning.
    """

    job: JobName
    fresh: bool = False


class SettingsChanged(msgspec.Struct, frozen=True, tag="settings_changed"):
    """The scheduler owner's request to change settings; None: the setting stays.

    Attributes
    ----------
    policy, options
        The policy's name and all its options, both or none.
    quotas
        All quotas: how many devices the jobs of a tenant may ask for together.
    switch_share
        The part of the time that switching may take.
    prestart
        How many jobs are started before their turn.
    grace_s, wait_for_node_s
        The times of jobs that are submitted without them from now on.
    devices
        The names of all devices.
    """

    policy: Word | None = None
    options: dict[Word, Word] | None = None
    quotas: dict[Label, Count] | None = None
    switch_share: Seconds | None = None
    prestart: Count | None = None
    grace_s: Seconds | None = None
    wait_for_node_s: Seconds | None = None
    devices: tuple[Label, ...] | None = None


#: The requests of a job's owner.
OwnerRequest = Cancelled | Held | Released | Moved | Weighted | Adjusted | Requeued
#: The requests that are about devices.
DeviceRequest = Paused | Unpaused | Drained | Undrained | Reserved | Unreserved
Event = (
    Submitted
    | ArraySubmitted
    | Reported
    | RankGone
    | Exited
    | Brought
    | StateWaits
    | PortFound
    | WaitsAhead
    | NoRoom
    | OwnerRequest
    | DeviceRequest
    | SettingsChanged
    | Clocked
    | DevicesUsed
    | Kept
    | TakenOver
    | Measured
    | Noted
    | Computed
    | Limited
    | NodeSilent
    | NodeLost
    | NodeFound
    | Woken
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(event: Event) -> bytes:
    """Return ``event`` as the bytes that the journal keeps.

    Raises
    ------
    UsageError
        If the event has a value that no event may have: the journal could not be replayed.
    """
    try:
        written = _encoder.encode(event)
        _decoder.decode(written)
    except (OverflowError, UnicodeEncodeError, TypeError, *NOT_A_VALUE) as error:
        raise UsageError(f"{type(event).__name__} is not possible: {explain(error)}") from error
    return written


def named(event: Event) -> str:
    """Return a name of ``event`` for people: its tag, or that of the rank's message or note it contains."""
    if isinstance(event, Noted):
        return event.what
    return str((event.message if isinstance(event, Reported) else event).__struct_config__.tag)


def job_of(event: Event) -> str:
    """Return the id of the job that ``event`` is about; empty if it is about none.

    Of an array's submission it is the array's id.
    """
    return event.spec.id if isinstance(event, Submitted | ArraySubmitted) else str(getattr(event, "job", ""))


def submitted(event: Event) -> Iterator[tuple[JobSpec, Program]]:
    """Yield each job that ``event`` brings in, with its program. Yield nothing if it brings in none."""
    if isinstance(event, Submitted):
        yield event.spec, event.program
    elif isinstance(event, ArraySubmitted):
        for point in event.points:
            environ = {**event.program.environ, **point.environ}
            program = Program(point.argv, event.program.directory, environ)
            yield msgspec.structs.replace(event.spec, id=point.id, array=event.spec.id), program
    elif isinstance(event, TakenOver):
        for one in event.kept.jobs:
            yield one.spec, one.program


def decode(written: bytes) -> Event:
    """Return the event that ``encode`` wrote. Anything else raises one of ``wire.NOT_A_VALUE``."""
    return _decoder.decode(written)


class Bring(msgspec.Struct, frozen=True, tag="bring"):
    """The order to bring the state of ``job`` to other nodes, where its processes are started then.

    ``sources`` and ``targets`` are, for each rank that keeps some state, the node where the state is and the
    node where it goes. The answer is ``Brought``.
    """

    job: str
    attempt: int
    sources: tuple[str, ...]
    targets: tuple[str, ...]


class FindPort(msgspec.Struct, frozen=True, tag="find_port"):
    """The order to find a port of ``node`` at which the ranks of ``job`` meet. Answered by ``PortFound``."""

    job: str
    attempt: int
    node: str


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """The order to start the processes of ``job``, whose turn is near. They will say Hello and then wait.

    ``attempt`` counts from 0. ``nodes`` are the nodes of the ranks, in rank order; empty: the scheduler's
    own. ``port`` is the port of the first of several nodes at which the ranks meet; 0: there is one node.
    """

    job: str
    program: Program
    attempt: int = 0
    nodes: tuple[str, ...] = ()
    port: int = 0


class StartAhead(msgspec.Struct, frozen=True, tag="start_ahead"):
    """The order to start the process of ``attempt`` of ``job`` on ``node``, up to where it would greet.

    It may go on when it is launched. Answered by ``WaitsAhead`` if the job waits for that.
    """

    job: str
    attempt: int
    node: str


class GiveUpAhead(msgspec.Struct, frozen=True, tag="give_up_ahead"):
    """The order to end the process of ``job`` that was started ahead on ``node``."""

    job: str
    node: str


class Tell(msgspec.Struct, frozen=True, tag="tell"):
    """The order to send ``message`` to a rank, or to ``pid`` if that is not the rank's process now."""

    job: str
    rank: int
    message: ToAgent
    pid: int = 0


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """The order to end all processes of ``job`` up to ``attempt``, within its grace time or at once.

    A later order for the same attempt may be stricter, and never more patient.
    """

    job: str
    reason: str
    attempt: int
    purpose: Purpose

    @property
    def at_once(self) -> bool:
        """True if the processes are killed without being asked to end."""
        return self.purpose is Purpose.RELOCATE


class WakeAt(msgspec.Struct, frozen=True, tag="wake_at"):
    """The order to send ``Woken`` at ``when_s``, replacing the last wake time. None: send no ``Woken``."""

    when_s: float | None


class Compute(msgspec.Struct, frozen=True, tag="compute"):
    """The order to compute ``task`` in the background and send ``Computed``. There is one at a time."""

    number: int
    task: Task


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """A message for people. The shell returns it as ``Noted``, so that the journal has it in its place."""

    what: str
    job: str = ""
    details: Mapping[str, Plain] = {}


Command = Bring | FindPort | StartAhead | GiveUpAhead | Launch | Tell | Kill | WakeAt | Compute | Notice
