"""A job as policies see it: what its owner asked for, and what it has been given so far."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from gpuslice.job_request import JobRequest
from gpuslice.types import ByteCount, Count, JobName, Label, Moment, Seconds, Text

#: For how long others must use a device, as a rule, until jobs park for them.
FOREIGN_GRACE_S = 10.0
#: Seconds that a job has to save a checkpoint when it is told to end, unless it was submitted with others.
GRACE_S = 30.0
#: Seconds that a job waits for a node with its processes or its state, unless it was submitted with others.
WAIT_FOR_NODE_S = 600.0


class JobDefaults(NamedTuple):
    """The times of jobs that were submitted without them, as ``JobSpec`` has them."""

    grace_s: float = GRACE_S
    wait_for_node_s: float = WAIT_FOR_NODE_S


DEFAULTS = JobDefaults()


class JobSpec(JobRequest, frozen=True, kw_only=True):
    """The description of a job at its submission: what was asked for, and what the scheduler makes of it.

    How long the job really runs is not part of it (see ``Knowledge``).

    Attributes
    ----------
    id
        Unique name.
    submit_s
        When it arrived.
    model
        The name that jobs which behave alike have in common.
    least_devices
        The least devices that an elastic job may shrink to; 0: ``devices``.
    relaunch
        True if its command starts as many ranks as it is told, and is started anew for another number.
    deadlines
        ``(seconds after submission, value)`` pairs, earliest first: one pair is a hard deadline, several a
        soft one, none means best effort.
    skew
        Largest share of one tensor in the model's parameters (Tiresias, section 3.3); ``None``: not known.
    steps
        How many optimizer steps it has, as far as is known; after ``max_steps`` it ends.
    trial_batches
        The mini-batches of its trial, in which it runs ahead of every queue (``trials``); 0: no trial.
    grace_s
        How long its processes may take to end when they are asked to; 0: they are killed unasked.
    wait_for_node_s
        How long it waits for a node that does not answer and has its processes or its state.
    array, at_once
        The array that it is a job of (empty: none), and how many of the array's jobs may have devices at a
        time (0: any number).
    cpus, host_memory_bytes
        What the whole job needs of the hosts, for multi-resource policies; 0: not stated.
    """

    id: JobName
    submit_s: Moment
    model: Text = ""
    least_devices: Count = 0
    relaunch: bool = False
    deadlines: tuple[tuple[Seconds, float], ...] = ()
    skew: float | None = None
    trial_batches: Count = 0
    grace_s: Seconds = GRACE_S
    wait_for_node_s: Seconds = WAIT_FOR_NODE_S
    array: Label = ""
    at_once: Count = 0
    cpus: Count = 0
    host_memory_bytes: ByteCount = 0

    @property
    def elastic(self) -> bool:
        """True if the job may have more devices than it asks for."""
        return self.most_devices > self.devices

    @property
    def ranks(self) -> int:
        """The number of the job's processes: as many as it may have devices."""
        return max(self.devices, self.most_devices)

    @property
    def joined(self) -> bool:
        """True if the job is elastic and all its ranks live from the beginning on."""
        return self.elastic and not self.relaunch

    @property
    def kill_when_late(self) -> bool:
        """True if the job is ended when it does not reach a boundary in time."""
        return self.on_boundary_timeout == "kill"

    @property
    def last_deadline_s(self) -> float | None:
        """The job's last deadline, in seconds after submission; None without a deadline."""
        return self.deadlines[-1][0] if self.deadlines else None

    @property
    def due_s(self) -> float:
        """The time of the job's last deadline; infinite without one."""
        return self.submit_s + self.deadlines[-1][0] if self.deadlines else inf


class Job:
    """A job that has arrived and is not finished. Only the shell that owns it writes to it; policies read it.

    Attributes
    ----------
    spec
        What was asked for. ``id`` and ``demand`` are repeated here because policies read them all the time.
    least, most
        The least and the most devices that it may have; both are ``demand`` unless it is elastic.
    within
        Nodes of which one must have all of its devices; empty if it may have any. The live core sets this for
        elastic jobs where processes cannot be on two nodes.
    closed
        Devices that it may not have now: they are reserved for others, or no job is to begin on them. (What
        no job may have is not in ``View.cluster``.) The live core sets this, and a reset follows.
    stays_on
        The node that is to have all of its devices for now, because a move costs more than it is worth; None:
        any. The live core sets it for policies that look at it (``policy.KeepsToNodes``).
    number
        Order of arrival, from 0.
    placement
        The devices it holds, rank order; once suspended or finished, the devices it held last.
    epoch
        Number of the job's leases so far.
    running
        True if it holds ``placement`` now (a job being brought back counts as running).
    since_s
        While it runs: when this run starts to make progress. While it waits: since when it waits.
    executed_s
        Time spent making progress in earlier runs.
    service_s
        Attained service of earlier runs, in device-seconds.
    progress_s
        Work done in earlier runs, in seconds of a dedicated run: ``executed_s`` at rate 1.
    rate
        Progress per second of the present run.
    first_start_s
        When it ran first, if it did.
    preemptions, migrations
        How often it was suspended for others, and moved.
    skew
        The skew of its model: as its owner stated it, else as measured after its first steps. None: unknown.
    peak_bytes
        The most memory that it was seen to use on a device while it trained; 0: not measured.
    guaranteed
        True if the policy has guaranteed its deadline. None: not decided, or no policy of that kind.
    """

    __slots__ = (
        "closed",
        "demand",
        "epoch",
        "executed_s",
        "first_start_s",
        "guaranteed",
        "id",
        "least",
        "migrations",
        "most",
        "number",
        "peak_bytes",
        "placement",
        "preemptions",
        "progress_s",
        "rate",
        "running",
        "service_s",
        "since_s",
        "skew",
        "spec",
        "stays_on",
        "within",
    )

    def __init__(self, spec: JobSpec, number: int) -> None:
        self.spec = spec
        self.id = spec.id
        self.demand = spec.devices
        self.least = spec.least_devices or spec.devices
        self.most = max(spec.most_devices or spec.devices, self.least)
        self.within: tuple[int, ...] = ()
        self.stays_on: int | None = None
        self.closed: frozenset[int] = frozenset()
        self.number = number
        self.placement: tuple[int, ...] = ()
        self.epoch = 0
        self.running = False
        self.since_s = spec.submit_s
        self.executed_s = 0.0
        self.service_s = 0.0
        self.progress_s = 0.0
        self.rate = 1.0
        self.first_start_s: float | None = None
        self.preemptions = 0
        self.migrations = 0
        self.guaranteed: bool | None = None
        self.skew = spec.skew
        self.peak_bytes = 0

    @property
    def kind(self) -> str:
        """The name that jobs which behave alike share: the model, or the job's name if it has no model."""
        return self.spec.model or self.id

    def may_be_on(self, nodes: set[int]) -> bool:
        """Return True if the job may have devices on all of ``nodes`` at the same time."""
        return not self.within or (len(nodes) == 1 and nodes.issubset(self.within))

    def may_have(self, devices: Iterable[int]) -> bool:
        """Return True if none of ``devices`` is closed to the job."""
        return self.closed.isdisjoint(devices)

    def executed_at(self, now_s: float) -> float:
        """Return the seconds in which the job has made progress, up to ``now_s``."""
        if self.running and now_s > self.since_s:
            return self.executed_s + (now_s - self.since_s)
        return self.executed_s

    def service_at(self, now_s: float) -> float:
        """Return the job's attained service up to ``now_s``: devices times time, in device-seconds."""
        if self.running and now_s > self.since_s:
            return self.service_s + (now_s - self.since_s) * len(self.placement)
        return self.service_s

    def progress_at(self, now_s: float) -> float:
        """Return the work that the job has done up to ``now_s``, in seconds of a dedicated run."""
        if self.running and now_s > self.since_s:
            return self.progress_s + (now_s - self.since_s) * self.rate
        return self.progress_s

    def waited_at(self, now_s: float) -> float:
        """Return for how many seconds the job has waited since it last ran or arrived; 0 while it runs."""
        return 0.0 if self.running else now_s - self.since_s

    def settle(self, now_s: float) -> None:
        """Add the present run, up to ``now_s``, to the job's sums. The run goes on. For shells only."""
        if self.running and now_s > self.since_s:
            elapsed_s = now_s - self.since_s
            self.executed_s += elapsed_s
            self.service_s += elapsed_s * len(self.placement)
            self.progress_s += elapsed_s * self.rate
            self.since_s = now_s

    def __repr__(self) -> str:
        where = f"on {self.placement}" if self.running else "waiting"
        return f"<Job {self.id} demand={self.demand} {where}>"
