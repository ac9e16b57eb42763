"""What can keep a job from training: the facts that ``why`` makes a sentence of and ``blockers`` reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gpuslice.sched_core.jobs.states import JobState


class Use(NamedTuple):
    """A device that is not free.

    Attributes
    ----------
    jobs
        The jobs that use it; if there are none, the jobs that it is reserved for.
    used
        True if processes of ``jobs`` are on it.
    """

    device: str
    jobs: tuple[str, ...]
    used: bool = True


class Lost(NamedTuple):
    """A node that does not answer (``node b``), and for how long it has not."""

    node: str
    for_s: float


class Quota(NamedTuple):
    """A limit that keeps a job out: the devices of a tenant, or the number of jobs of an array at once.

    ``used`` is what the jobs ``inside`` have of it. ``first`` is the next outside, and the job needs
    ``part``.
    """

    kind: str
    name: str
    limit: int
    used: int
    inside: tuple[str, ...]
    first: str
    part: int


class Refusal(NamedTuple):
    """The reason that a rank gave when it refused, and in how many seconds it is asked again."""

    error: str
    again_s: float


class Blocked(NamedTuple):
    """A device that the job should have, the job that is still on it, and why it is."""

    device: str
    job: str
    why: str


class Memory(NamedTuple):
    """The bytes that the job needs on a device, and the device with most left beside the jobs there."""

    needs_bytes: int
    device: str
    left_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts about a job and its surroundings that can keep it from training.

    Attributes
    ----------
    for_s
        Seconds since what it does now began: its state, its launch, its set-up.
    trains
        True if it makes progress now.
    demand
        The least number of devices that it can train on.
    launched, exists
        True if its command was started, in this attempt; True if a process of it exists.
    absent, ranks
        Its ranks that have not come yet, and how many there are.
    ending
        True if no rank of it is left that trains or waits to train.
    idle
        True if its processes have ended and its command goes on.
    on, state_from
        The nodes of its processes, and those that its state is brought from, in words; empty if there is only
        one node, or nothing to be brought.
    state_bytes, arrived_bytes
        The bytes of the state that is brought, 0: not known; and how many of them have arrived.
    stranded
        True if its state cannot be brought now.
    begin_unix_s, begins_s
        The moment before which it may not start, and in how many seconds that is; 0: it may.
    after
        What it waits for before it starts, in words, such as ``a has ended``.
    lost_processes, lost
        Nodes that do not answer: those of its processes, and all.
    awaited, waits_s
        The nodes that it waits for because they have its processes or its state, and for how much longer.
    copy
        The nodes that have the newest copy of its state elsewhere, and how old that is.
    bound_to
        Devices that alone can have its state, as far as others have them.
    within
        Nodes that it must be on, if not all devices will do.
    not_for
        Nodes on which its command could not be started, and why.
    no_room
        Nodes without room for its state, and what they have.
    kept
        True if it is parked, or has no process, because the scheduler is to leave (``down --keep``).
    lease, wanted
        Devices that it has; those that the plan has for it.
    closed, shut_out
        Why it may not have devices that it could have else, in words; True if it can be on no other ones.
    size
        How many devices can be had now, by anybody.
    outranked
        Jobs of higher priority that train or wait.
    queued_before
        Jobs in more urgent queues of the policy.
    """

    id: str
    state: JobState
    policy: str = ""
    demand: int = 1
    ranks: int = 1
    for_s: float = 0.0
    trains: bool = False
    held: bool = False
    kept: bool = False
    launched: bool = True
    exists: bool = True
    begin_unix_s: float = 0.0
    begins_s: float = 0.0
    after: tuple[str, ...] = ()
    # processes
    retry_s: float = 0.0
    reason: str = ""
    absent: tuple[int, ...] = ()
    started_before: tuple[str, ...] = ()
    ending: bool = False
    idle: bool = False
    relocating: bool = False
    on: str = ""
    state_from: str = ""
    state_bytes: int = 0
    arrived_bytes: int = 0
    stranded: bool = False
    lost_processes: tuple[Lost, ...] = ()
    awaited: tuple[Lost, ...] = ()
    waits_s: float = 0.0
    copy: Lost | None = None
    # on devices
    lease: tuple[str, ...] = ()
    finishing: bool = False
    stuck: str = ""
    unleased: str = ""
    late: int = 0
    suspend_refused: Refusal | None = None
    resume_refused: Refusal | None = None
    # without
    quota: Quota | None = None
    tenant: str = ""
    over_share: bool = False
    trial_waits: bool = False
    tried: tuple[Use, ...] = ()
    lent_to: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    blocked: Blocked | None = None
    policy_error: str = ""
    policy_again_s: float | None = None
    computes: bool = False
    lost: tuple[Lost, ...] = ()
    closed: tuple[str, ...] = ()
    shut_out: bool = False
    bound_to: tuple[Use, ...] = ()
    within: tuple[str, ...] = ()
    not_for: tuple[tuple[str, str], ...] = ()
    no_room: tuple[tuple[str, str], ...] = ()
    size: int = 0
    free: tuple[str, ...] = ()
    taken: tuple[Use, ...] = ()
    queued_before: int = 0
    outranked: int = 0
    memory: Memory | None = None
