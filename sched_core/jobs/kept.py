"""What is known of jobs that are kept while no scheduler runs, as it is written for a later scheduler.

These structs are the format of ``kept.json`` and of the event with which a new journal takes its jobs over.
So a field may be added, with a default, but never removed or given another meaning: a later version reads
what this one has written (``tests/gpuslice/daemon/kept``).
"""

from __future__ import annotations

import msgspec

from gpuslice.sched_core.job import JobSpec
from gpuslice.types import ByteCount, Count, JobName, Label, Moment, Text, UnixTime

from .program import Program


class Tally(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The counts and sums of a job, each under the name that ``Gang`` has for it."""

    epoch: Count = 0
    attempt: Count = 0
    relaunches: Count = 0
    preemptions: Count = 0
    migrations: Count = 0
    executed_s: Moment = 0.0
    service_s: Moment = 0.0
    progress_s: Moment = 0.0
    waited_s: Moment = 0.0
    held_s: Moment = 0.0
    switching_s: Moment = 0.0
    setup_s: Moment = 0.0
    not_counted_s: Moment = 0.0
    fair_share_s: Moment = 0.0
    fragmentation_s: Moment = 0.0
    not_before_s: Moment = 0.0
    since_s: Moment = 0.0
    first_start_s: Moment | None = None
    skew: float | None = None
    peak_bytes: ByteCount = 0
    guaranteed: bool | None = None
    deadline_missed: bool = False
    tried: bool = True
    given_up: bool = False
    held: bool = False


class KeptJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job without a process that has not ended.

    Attributes
    ----------
    spec, program
        What was asked for, and its command. Of the conditions of its start only those that are not fulfilled.
    tally
        Its counts and sums at ``kept_s``. No time has been counted since.
    kept_s
        When it was written, on the scheduler's clock.
    begun
        True if it has had devices since it was queued.
    steps, state_bytes
        The steps that it has made, and the bytes of its state; 0 bytes: not known.
    keepers
        The number of its ranks, from rank 0 on, that have a state; 0: it begins from the beginning.
    devices
        The names of its last devices, rank order.
    anew
        True if its next attempt begins anew: its snapshots are removed first.
    missed
        How often it was late since it was last suspended as told.
    reason, failure
        Why its last attempt failed, and the class of that failure.
    """

    spec: JobSpec
    program: Program
    tally: Tally
    kept_s: Moment
    begun: bool = False
    steps: Count = 0
    state_bytes: ByteCount = 0
    keepers: Count = 0
    devices: tuple[Label, ...] = ()
    anew: bool = False
    missed: Count = 0
    reason: Text = ""
    failure: Label = ""


class KeptPause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A paused device, and until which Unix time (None: until it is unpaused)."""

    device: Label
    until_unix_s: UnixTime | None = None


class KeptReservation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Devices that only the jobs of ``tenant`` may have from one Unix time to another."""

    name: JobName
    devices: tuple[Label, ...]
    begin_unix_s: UnixTime
    end_unix_s: UnixTime
    tenant: Label = ""


class KeptJobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All jobs of a scheduler that have not ended, in order of submission, and which devices are closed.

    ``reserved`` is the number of reservations that there ever were.
    """

    jobs: tuple[KeptJob, ...]
    paused: tuple[KeptPause, ...] = ()
    drained: tuple[Label, ...] = ()
    reservations: tuple[KeptReservation, ...] = ()
    reserved: Count = 0
