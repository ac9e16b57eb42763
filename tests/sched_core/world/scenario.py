"""What one world consists of and what happens in it, all drawn from its seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.lifecycle.events import SettingsChanged
from gpuslice.types import DeviceName

from .draws import Draws
from .profiles import PROFILES, Profile

#: After so long nothing goes wrong any more, and all do as they are told.
CALM_S = 60.0
#: After so long without a word a node gets nothing new, and after the other it is lost.
SILENT_AFTER_S = 3.0
LOST_AFTER_S = 8.0


@dataclass(frozen=True)
class JobPlan:
    """A job, and what its script really does.

    Attributes
    ----------
    boundaries
        After so many its training ends.
    step_s
        From one boundary to the next.
    trainings
        So many its command makes, one after another.
    odd
        Whether it can park at odd boundaries; else its ranks pass these by.
    portable, bound
        How often another process can go on from its snapshot, and how often it can resume only where it was.
    """

    spec: JobSpec
    boundaries: int
    step_s: float
    trainings: int = 1
    odd: bool = True
    portable: float = 1.0
    bound: float = 0.0


@dataclass(frozen=True)
class Wish:
    """What the owner of ``job`` asks for, and when."""

    when_s: float
    job: str
    what: str
    devices: tuple[str, ...] = ()
    value: float = 0.0


@dataclass(frozen=True)
class Outage:
    """From ``from_s`` on for ``for_s`` nothing is heard of a node.

    If it ``crashes`` it loses all. If it ``stalls``, all of it stands still, and no message is lost.
    """

    node: str
    from_s: float
    for_s: float
    crashes: bool
    stalls: bool = False


@dataclass(frozen=True)
class Window:
    """A time in which ``devices`` are paused, drained, reserved or used by others, and when it begins."""

    when_s: float
    for_s: float
    what: str
    devices: tuple[str, ...]
    tenant: str


@dataclass(frozen=True)
class Change:
    """What the scheduler's owner sets, and when."""

    when_s: float
    event: SettingsChanged


@dataclass(frozen=True)
class Room:
    """From ``when_s`` on a node takes states of so many bytes, as long as nothing else is said of it."""

    when_s: float
    node: str
    nbytes: int


@dataclass(frozen=True)
class Scenario:
    """A world before its first event.

    Attributes
    ----------
    restarts
        When the scheduler ends, and how long nobody takes its place.
    reboots
        When the machine is switched off with all jobs kept (``down --keep``), and for how long.
    faults
        Whether anything goes wrong and takes its own time.
    calm_s
        When nothing goes wrong any more.
    options
        Options of the policy. None: its slices are short.
    """

    seed: int
    profile: Profile
    nodes: tuple[str, ...]
    per_node: int
    policy: str
    placement: str = ""
    shares: bool = False
    prestart: int | None = None
    quotas: dict[str, int] = field(default_factory=dict)
    device_memory_bytes: int = 0
    starts_ahead: bool = False
    jobs: tuple[JobPlan, ...] = ()
    wishes: tuple[Wish, ...] = ()
    outages: tuple[Outage, ...] = ()
    windows: tuple[Window, ...] = ()
    changes: tuple[Change, ...] = ()
    rooms: tuple[Room, ...] = ()
    restarts: tuple[tuple[float, float], ...] = ()
    reboots: tuple[tuple[float, float], ...] = ()
    faults: bool = True
    calm_s: float = CALM_S
    options: Mapping[str, str] | None = None

    @property
    def devices(self) -> list[DeviceName]:
        return [DeviceName("null", index).on(node) for node in self.nodes for index in range(self.per_node)]

    def without_faults(self) -> Scenario:
        """Return the same jobs and wishes in a world where nothing goes wrong."""
        jobs = tuple(replace(job, portable=1.0, bound=0.0) for job in self.jobs)
        return replace(self, jobs=jobs, outages=(), restarts=(), faults=False)


def draw_scenario(seed: int) -> Scenario:
    """Return the world of ``seed``."""
    draws = Draws(seed)
    profile = draws.choice(PROFILES, "profile")
    nodes = draws.choice(profile.nodes, "nodes")
    per_node = draws.choice([1, 2, 2, 3] if len(nodes) == 1 else [1, 2, 2], "per node")
    policy = draws.choice(profile.policies, "policy")
    shares = policy == "restless" and draws.chance(0.3, "shares")
    scenario = Scenario(
        seed,
        profile,
        nodes,
        per_node,
        policy,
        placement=draws.choice(["", "count", "spread"], "placement"),
        shares=shares,
        prestart=draws.choice([None, None, 0, 1, 2], "prestart"),
        quotas={"t": 2} if draws.chance(0.3, "quotas") and len(nodes) * per_node > 1 else {},
        device_memory_bytes=draws.choice([0, 8], "memory"),
        starts_ahead=draws.chance(0.5, "starts ahead"),
    )
    jobs = tuple(_draw_job(draws, scenario, name) for name in "abcdef"[: draws.number(2, 6, "jobs")])
    return replace(
        scenario,
        jobs=jobs,
        wishes=tuple(sorted(_draw_wishes(draws, scenario, jobs), key=lambda wish: wish.when_s)),
        outages=tuple(_draw_outages(draws, profile, nodes)),
        restarts=tuple(_draw_restarts(draws, profile)),
    )


def _draw_job(draws: Draws, scenario: Scenario, name: str) -> JobPlan:
    profile = scenario.profile
    size, kind = len(scenario.nodes) * scenario.per_node, draws.choice(profile.kinds, name, "kind")
    most = min(draws.choice([2, 3], name, "most"), scenario.per_node)
    if (kind in ("joined", "relaunched") and most < 2) or (kind == "gang" and size < 2):
        kind = "one"
    elastic, is_due = kind in ("joined", "relaunched"), draws.chance(0.2, name, "due")
    spec = JobSpec(
        id=name,
        submit_s=draws.between(0.0, 15.0, name, "submit"),
        devices=min(size, draws.choice([2, 2, 3], name, "demand")) if kind == "gang" else 1,
        most_devices=most if elastic else 0,
        relaunch=kind == "relaunched",
        tenant=draws.choice(["", "t"], name, "tenant"),
        max_restarts=draws.choice([0, 2, 2], name, "restarts"),
        boundary_timeout_s=draws.choice(profile.timeouts_s, name, "timeout"),
        on_boundary_timeout="kill" if draws.chance(0.2, name, "kill") else "leave",
        trial_batches=draws.choice(profile.trials, name, "trial"),
        # Unasked, it could save no checkpoint.
        grace_s=3.0 if kind == "relaunched" else draws.choice([0.0, 3.0], name, "grace"),
        deadlines=((draws.between(10.0, 60.0, name, "deadline"), 1.0),) if is_due else (),
        device_memory_bytes=draws.choice([0, 2, 4], name, "memory"),
        max_steps=draws.choice([0, 0, 0, 6], name, "max steps"),
        wait_for_node_s=draws.choice([0.0, 12.0, 600.0], name, "wait for node"),
    )
    if (quota := scenario.quotas.get(spec.tenant)) is not None and spec.ranks > quota:
        spec = msgspec.structs.replace(spec, tenant="")
    return JobPlan(
        spec,
        boundaries=draws.number(*profile.boundaries, name, "boundaries"),
        step_s=draws.between(0.1, 0.8, name, "step"),
        trainings=draws.choice([2, 3], name, "trainings") if kind == "series" else 1,
        odd=not draws.chance(profile.even, name, "odd"),
        portable=draws.choice(profile.portable, name, "portable"),
        bound=draws.choice([0.0, 0.0, 0.3], name, "bound"),
    )


def _draw_wishes(draws: Draws, scenario: Scenario, jobs: tuple[JobPlan, ...]) -> list[Wish]:
    devices, profile = [str(device) for device in scenario.devices], scenario.profile
    found: list[Wish] = []
    for job in jobs:
        name = job.spec.id
        for number in range(draws.choice(profile.wishes_each, name, "wishes")):
            key = (name, "wish", number)
            what = draws.choice(profile.wishes, *key)
            onto = tuple(draws.sample(devices, job.spec.devices, *key, "onto")) if what == "move" else ()
            found.append(Wish(draws.between(2.0, CALM_S - 5.0, *key, "when"), name, what, onto))
    return found


def _draw_outages(draws: Draws, profile: Profile, nodes: tuple[str, ...]) -> list[Outage]:
    found: list[Outage] = []
    for node in nodes[1:]:
        from_s = 0.0
        for number in range(draws.choice(profile.outages, node, "outages")):
            from_s += draws.between(5.0, 20.0, node, number, "from")
            for_s = draws.between(0.5, 3.0 * LOST_AFTER_S, node, number, "for")
            crashes = draws.chance(0.3, node, number, "crashes")
            stalls = not crashes and draws.chance(0.4, node, number, "stalls")
            found.append(Outage(node, from_s, for_s, crashes, stalls))
            from_s += for_s
    return [outage for outage in found if outage.from_s + outage.for_s < CALM_S - 2.0]


def _draw_restarts(draws: Draws, profile: Profile) -> list[tuple[float, float]]:
    found, when_s = list[tuple[float, float]](), 0.0
    for number in range(draws.choice(profile.restarts, "restarts")):
        when_s += draws.between(3.0, 20.0, "restart", number)
        away_s = draws.choice([0.0, 0.5, 6.0, 12.0], "restart", number, "away")
        found.append((when_s, away_s))
        when_s += away_s
    return [(when_s, away_s) for when_s, away_s in found if when_s + away_s < CALM_S - 2.0]
