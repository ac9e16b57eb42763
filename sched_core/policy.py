"""The contract between policies and the two worlds that run them, live and simulated.

A policy is called whenever something happened and whenever it asked to be woken. It reads a ``View`` and
returns a ``Plan``: what shall be different from now on, and when to wake it. It never acts, waits or reads a
clock, and it is never told which world it is in. docs/policies.md shows a complete one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import Protocol, runtime_checkable

import msgspec

from gpuslice.errors import UsageError

from .cluster import Cluster, FreeDevices
from .interference import Interval
from .job import Job
from .knowledge import Knowledge, Losses, NoKnowledge, NoLosses, NoThroughput, Throughput


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The decision to start or resume ``job`` on ``devices`` (rank order).

    ``shared`` allows other jobs on the same devices, if every one of them allows it too (packing).
    """

    job: str
    devices: tuple[int, ...]
    shared: bool = False


class Suspend(msgspec.Struct, frozen=True, tag="suspend"):
    """The decision to take ``job`` off its devices. The job waits and keeps its state."""

    job: str


class Migrate(msgspec.Struct, frozen=True, tag="migrate"):
    """The decision to suspend ``job`` and resume it on ``devices``. It also resizes an elastic job."""

    job: str
    devices: tuple[int, ...]
    shared: bool = False


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The decision to end ``job`` for good before its time: a tuner gave it up, or admission refused it."""

    job: str
    reason: str


Decision = Start | Suspend | Migrate | Stop


class Plan(msgspec.Struct, frozen=True):
    """The decisions of a policy, and when it wants to be called even if nothing happens.

    Devices are released (``Suspend``, ``Migrate``, ``Stop``) before any is taken, so a plan may hand a device
    over. Jobs that are not mentioned go on as they are. ``wake_at_s`` replaces that of the last plan.
    """

    decisions: Sequence[Decision] = ()
    wake_at_s: float | None = None


class Changes:
    """The changes since the policy's last plan, by which it can keep ordered structures up to date.

    Attributes
    ----------
    reset
        True if the policy must forget everything and start again from ``View.jobs``: at the first call, after
        a replay, or if the last plan could not be carried out. Of the other fields only ``succeeded`` counts.
    arrived
        New jobs, waiting, in order of arrival.
    finished
        Jobs that ended, by themselves or otherwise, or that their owner holds back (held jobs may arrive
        again). They are no longer in ``View.jobs``. ``Job.running`` tells, for the last time, if they held
        ``placement``, which is free now.
    succeeded
        Jobs that ended well. ``finished`` does not tell why other jobs are gone.
    begun
        Jobs whose ``since_s`` was not known when they were started, or has changed: they make progress from
        that moment on. They may have finished since.
    settled
        Jobs that have attained service since a plan took their devices: until they had left them, or because
        they could not. They wait, and may have finished since. In a simulation, where jobs leave at once,
        there are none.
    """

    __slots__ = ("arrived", "begun", "finished", "reset", "settled", "succeeded")

    def __init__(self, *, reset: bool = False) -> None:
        self.reset = reset
        self.arrived: list[Job] = []
        self.finished: list[Job] = []
        self.succeeded: list[Job] = []
        self.begun: list[Job] = []
        self.settled: list[Job] = []

    def outdated(self) -> Changes:
        """Return a reset that keeps ``succeeded``, which cannot be seen from ``View.jobs``."""
        fresh = Changes(reset=True)
        fresh.succeeded = self.succeeded
        return fresh

    def withdrawn(self, job: Job) -> None:
        """Note that ``job`` is gone. If the policy has not heard of it yet, forget its arrival instead."""
        if job in self.arrived:
            self.arrived.remove(job)
        else:
            self.finished.append(job)


class Task(msgspec.Struct, frozen=True):
    """A computation that may take seconds. The same argument has the same answer.

    Attributes
    ----------
    function
        ``package.module:name`` of a function that takes bytes and returns bytes.
    argument
        The bytes that the function takes.
    """

    function: str
    argument: bytes

    def compute(self) -> bytes:
        """Compute the answer here and now, and return it."""
        module, _, name = self.function.partition(":")
        function: Callable[[bytes], bytes] = getattr(importlib.import_module(module), name)
        return function(self.argument)


#: See ``View.compute``.
Compute = Callable[[Task], bytes | None]
#: See ``View.switch_s``.
Switch = Callable[[Job, Sequence[int]], float | None]


def _free_switch(job: Job, devices: Sequence[int]) -> float | None:
    """Return 0: switching costs nothing."""
    return 0.0


class View:
    """The read-only picture from which a policy decides.

    Attributes
    ----------
    now_s
        The present, in seconds on the world's own clock.
    cluster
        Nodes and devices. Devices of lost nodes cannot be had (``Cluster.without``). When that changes,
        ``changes`` are a reset.
    jobs
        All unfinished jobs by id, in order of arrival.
    changes
        What happened since the last plan.
    knowledge
        What is known of running times.
    losses
        What jobs report of their training loss.
    throughput
        How fast jobs trained: alone, beside others, and on how many devices.
    device_memory_bytes
        Bytes of each device; 0: not known.
    array_bytes
        The most memory that a job of an array was seen to use on a device, by array.
    least_slice_s
        How long a slice must last for switching to stay a small part of the time, from measured costs; 0
        where switching costs nothing or is not measured.
    measures_rates
        True if ``Job.rate`` is what a job really makes beside others on its devices. If it is not, it cannot
        be known whether packing pays.
    switch_s
        Returns the seconds without progress that it would cost a job to be suspended and resumed on given
        devices. None: not known.
    restricted
        The devices that are closed to some jobs now (``Job.closed``).
    can_move
        Returns False if a job can go on only on the devices where it is.
    compute
        Returns the answer of a ``Task``, or None if it is not there yet. Then the policy plans without it, is
        called again when it is there, and asks for the same task. In a simulation it always is there.
    """

    __slots__ = (
        *("array_bytes", "can_move", "changes", "cluster", "compute", "device_memory_bytes", "jobs"),
        *("knowledge", "least_slice_s", "losses", "measures_rates", "now_s", "restricted", "switch_s"),
        "throughput",
    )

    def __init__(
        self,
        cluster: Cluster,
        jobs: Mapping[str, Job],
        knowledge: Knowledge | None = None,
        now_s: float = 0.0,
    ) -> None:
        self.cluster = cluster
        self.jobs = jobs
        self.knowledge: Knowledge = NoKnowledge() if knowledge is None else knowledge
        self.losses: Losses = NoLosses()
        self.throughput: Throughput = NoThroughput()
        self.device_memory_bytes = 0
        self.array_bytes: Mapping[str, int] = {}
        self.now_s = now_s
        self.least_slice_s = 0.0
        self.measures_rates = False
        self.switch_s: Switch = _free_switch
        self.can_move: Callable[[Job], bool] = lambda job: True
        self.restricted: frozenset[int] = frozenset()
        self.compute: Compute = Task.compute
        self.changes = Changes(reset=True)

    def narrowed(self, cluster: Cluster, jobs: Mapping[str, Job]) -> View:
        """Return the view of a policy inside another: ``jobs`` on ``cluster``, both new to it."""
        inner = View(cluster, jobs)
        inner.follow(self)
        return inner

    def follow(self, view: View) -> None:
        """Copy all except cluster, jobs and changes from ``view``, of which this one was made."""
        self.now_s, self.knowledge, self.losses = view.now_s, view.knowledge, view.losses
        self.throughput, self.measures_rates = view.throughput, view.measures_rates
        self.device_memory_bytes, self.least_slice_s = view.device_memory_bytes, view.least_slice_s
        self.switch_s, self.compute, self.array_bytes = view.switch_s, view.compute, view.array_bytes
        self.can_move, self.restricted = view.can_move, view.restricted

    def slice_s(self, quantum_s: float) -> float:
        """Return how long slices of ``quantum_s`` must last: the least multiple that is worth switching."""
        # What was measured is not exact to the last bit; a whole multiple is not to become the next one.
        return quantum_s * max(1, ceil(self.least_slice_s / quantum_s - 1e-6))

    def waiting(self) -> Iterator[Job]:
        """Return an iterator over the jobs that hold no device, in order of arrival."""
        return (job for job in self.jobs.values() if not job.running)

    def running(self) -> Iterator[Job]:
        """Return an iterator over the jobs that hold devices, in order of arrival."""
        return (job for job in self.jobs.values() if job.running)

    def free(self) -> FreeDevices:
        """Return the devices that no job holds, as a new object that the policy may change while it plans.

        Costs one pass over the cluster. Policies for large clusters keep their own and follow ``changes``.
        """
        held = {device for job in self.running() for device in job.placement}
        return FreeDevices.besides(self.cluster, held)

    def loss(self, job: Job) -> float | None:
        """Return the newest loss that ``job`` reported, or None if it reported none."""
        return self.losses.loss(job, self.now_s)

    def measured(self, job: Job) -> bool:
        """Return True if ``remaining_s`` of ``job`` is more than a first guess."""
        return self.knowledge.measured(job)

    def remaining_s(self, job: Job) -> float:
        """Return the work left of ``job``, in seconds of a dedicated run. Raise as ``duration_s`` does."""
        return self.duration_s(job) - job.progress_at(self.now_s)

    def duration_s(self, job: Job) -> float:
        """Return all work of ``job``, in seconds of a dedicated run, as far as is known now.

        Raises
        ------
        PolicyError
            If its duration is not known to this policy.
        """
        duration_s = self.knowledge.duration_s(job)
        if duration_s is None:
            raise PolicyError(
                f"the duration of job {job.id} is not known",
                "declare needs_durations in the policy, and state durations or choose a policy without them",
            )
        return duration_s


class Policy(Protocol):
    """The interface of policies, which decide which job runs where. One object serves one world.

    Attributes
    ----------
    name
        As in ``--policy``.
    needs_durations
        True if it must know how long jobs run.
    """

    name: str
    needs_durations: bool

    def plan(self, view: View) -> Plan:
        """Return the plan for ``view``, given what happened (``view.changes``)."""
        ...


@runtime_checkable
class Queues(Protocol):
    """The interface of policies that can tell the queue of a job, for people to see."""

    def level(self, job: str) -> int | None:
        """Return the queue that the job is in, 0 being the most urgent. Return None if it is in none."""
        ...


@runtime_checkable
class Guarantees(Protocol):
    """The interface of policies that know deadlines and can tell which ones they guarantee."""

    def guaranteed(self, job: str) -> bool | None:
        """Return True if the deadline of a job is guaranteed. None: not decided yet, or it has none."""
        ...


@runtime_checkable
class Shares(Protocol):
    """The interface of policies that give tenants shares and can tell who has used up its own."""

    def over_share(self, tenant: str, demand: int) -> bool:
        """Return True if ``tenant`` would have more than its share with ``demand`` devices more."""
        ...


class PackVerdict(msgspec.Struct, frozen=True):
    """What was found of two jobs that shared a device.

    Attributes
    ----------
    together
        True if they share it from now on.
    slowdowns
        Rate alone / rate together, of each job.
    total
        Work of both together in units of one device; slicing makes 1.
    """

    jobs: tuple[str, str]
    together: bool
    slowdowns: tuple[Interval, Interval]
    total: Interval


@runtime_checkable
class Packs(Protocol):
    """The interface of policies that pack jobs and can tell what they found out."""

    @property
    def verdicts(self) -> Sequence[PackVerdict]:
        """All verdicts, the oldest first."""
        ...

    def slowdown(self, job: str) -> Interval | None:
        """Return how much slower ``job`` is beside the jobs on its device. None: not known, or alone."""
        ...


class Named(Protocol):
    """An object that has a name."""

    @property
    def name(self) -> str: ...


@runtime_checkable
class Places(Protocol):
    """The interface of policies that ask a placement where jobs go, and can tell which placement."""

    @property
    def placement(self) -> Named | None: ...


@runtime_checkable
class KeepsToNodes(Protocol):
    """The interface of policies that can tell if they leave jobs on their nodes (``Job.stays_on``)."""

    @property
    def keeps_to_nodes(self) -> bool: ...


def keeps_to_nodes(policy: Policy) -> bool:
    """Return True if ``policy`` looks at ``Job.stays_on``."""
    return isinstance(policy, KeepsToNodes) and policy.keeps_to_nodes


def placement_of(policy: Policy) -> str:
    """Return the name of the placement that ``policy`` asks. It is empty if the policy places jobs itself."""
    placement = policy.placement if isinstance(policy, Places) else None
    return "" if placement is None else placement.name


class PolicyError(UsageError):
    """The error of a policy that asks for something impossible or unknown. It names policy and plan."""


class TaskError(PolicyError):
    """The error of a policy's task that failed."""
