"""A week of a box: what thirty people ask of it, at random, and what must have come of it at its end."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import msgspec

from gpuslice.sched_core.job import JobSpec

from .draws import Draws
from .profiles import Profile
from .scenario import JobPlan, Scenario, Window, Wish
from .windows import UNIX_S
from .world import World, check

_HOUR_S, _DAY_S = 3600.0, 86400.0
_POLICIES = ("rr", "rr", "las", "2das", "gittins", "gandiva", "fjf", "fifo", "themis")
_SLICED = ("rr", "las", "gandiva")
_PROFILE = Profile("week", nodes=(("",),), refuses=0.02, slow=0.01)
#: How much longer than its time limit a job may have had devices, and how much shorter, in seconds.
_LATE_S = 60.0
#: How long a job may take to park, which does not count; a gang may wait for its slowest rank besides.
_LEAVES_S = 20.0


class _Person(NamedTuple):
    """Somebody who submits jobs, and what that person asks for afterwards."""

    jobs: list[JobPlan]
    wishes: list[Wish]


def draw_week(seed: int, days: int = 7, people: int = 30) -> Scenario:
    """Return the week of ``seed``."""
    draws, end_s = Draws(seed), days * _DAY_S
    per_node = draws.choice([2, 4, 8], "per node")
    policy = draws.choice(_POLICIES, "policy")
    quantum_s = draws.choice([1800.0, 3600.0], "quantum")
    options = {"quantum_s": str(quantum_s)} if policy in _SLICED else {}
    scenario = Scenario(
        seed, _PROFILE, ("",), per_node, policy, calm_s=end_s, options=options,
        prestart=draws.choice([None, 0, 4], "prestart"),
    )  # fmt: skip
    jobs, wishes = list[JobPlan](), list[Wish]()
    for number in range(people):
        person = _draw_person(draws, f"u{number}", jobs, per_node, end_s)
        jobs += person.jobs
        wishes += person.wishes
    reboot_s = draws.between(0.2, 0.7, "reboot") * end_s
    restarts = [
        (draws.between(0.0, 0.1, "restart", number) * end_s, draws.choice([0.0, 5.0, 600.0], "away", number))
        for number in range(draws.number(0, 1, "restarts"))
    ]
    return replace(
        scenario,
        jobs=tuple(jobs),
        wishes=tuple(sorted(wishes, key=lambda wish: wish.when_s)),
        windows=tuple(_draw_windows(draws, [str(device) for device in scenario.devices], people, end_s)),
        restarts=tuple(restarts),
        reboots=((reboot_s, draws.between(60.0, 900.0, "off")),),
    )


def _draw_person(draws: Draws, who: str, before: list[JobPlan], size: int, end_s: float) -> _Person:
    jobs, wishes = list[JobPlan](), list[Wish]()
    for number in range(draws.number(1, 4, who, "submissions")):
        name = f"{who}j{number}"
        plan = _draw_job(draws, name, who, [*before, *jobs], size, end_s)
        points = draws.choice([1, 1, 1, 2, 4, 8], name, "points")
        places = draws.choice([0, 1, 2], name, "at once")
        array = {"array": f"{name}-array", "at_once": places} if points > 1 else {}
        for point in range(points):
            spec = msgspec.structs.replace(plan.spec, id=f"{name}p{point}" if array else name, **array)
            jobs.append(replace(plan, spec=spec, boundaries=draws.number(2, 12, spec.id, "boundaries")))
            wishes += _draw_wishes(draws, spec, end_s)
    return _Person(jobs, wishes)


def _draw_job(draws: Draws, name: str, who: str, before: list[JobPlan], size: int, end_s: float) -> JobPlan:
    submit_s = draws.between(0.0, 0.8 * end_s, name, "submit")
    earlier = [plan.spec.id for plan in before if plan.spec.submit_s < submit_s]
    after: tuple[str, ...] = ()
    if earlier and draws.chance(0.3, name, "follows"):
        others = draws.sample(earlier, draws.number(1, min(2, len(earlier)), name, "count"), name, "after")
        after = tuple(
            other + draws.choice(["", "", ":any", ":failed"], name, other, "how") for other in others
        )
    elastic = draws.chance(0.1, name, "elastic") and size > 2
    spec = JobSpec(
        id=name,
        submit_s=submit_s,
        tenant=who,
        devices=1 if elastic else min(size, draws.choice([1, 1, 1, 2, 4], name, "devices")),
        most_devices=2 if elastic else 0,
        max_restarts=draws.choice([2, 5], name, "restarts"),
        grace_s=3.0,
        boundary_timeout_s=0.0,
        hold=draws.chance(0.1, name, "hold"),
        begin_unix_s=UNIX_S + submit_s + draws.between(0.0, 0.1, name, "begin") * end_s
        if draws.chance(0.2, name, "begins")
        else 0.0,
        after=after,
        time_limit_s=draws.choice([0.0, 0.0, 0.0, _HOUR_S, 3 * _HOUR_S, 8 * _HOUR_S], name, "time limit"),
        priority=draws.choice([-1, 0, 0, 0, 0, 1, 2], name, "priority"),
    )
    return JobPlan(spec, boundaries=2, step_s=draws.between(60.0, 1500.0, name, "step"))


def _draw_wishes(draws: Draws, spec: JobSpec, end_s: float) -> list[Wish]:
    """Return what is asked of a job: to go on if it is held, and now and then something else."""
    name = spec.id
    later = draws.between(spec.submit_s, 0.95 * end_s, name, "later")
    found = [Wish(later, name, "release")] if spec.hold else []
    for number in range(draws.choice([0, 0, 0, 0, 1, 2], name, "wishes")):
        key = (name, "wish", number)
        what = draws.choice(
            ["hold", "weigh", "priority", "time limit", "cancel", "requeue", "requeue --fresh"], *key
        )
        value = draws.choice(
            [_HOUR_S, 6 * _HOUR_S] if what == "time limit" else [-1.0, 0.0, 1.0], *key, "value"
        )
        when_s = draws.between(spec.submit_s, 0.95 * end_s, *key, "when")
        found.append(Wish(when_s, name, what, value=value))
        if what == "hold":
            found.append(Wish(draws.between(when_s, end_s, *key, "until"), name, "release"))
    return found


def _draw_windows(draws: Draws, names: list[str], people: int, end_s: float) -> list[Window]:
    """Return reservations, pauses and a drain. Another pause or drain of a device would replace the first."""
    found, free = list[Window](), list(names)
    kinds = ["drain", "pause", "pause", *["reserve"] * draws.number(2, 12, "reservations")]
    for number, what in enumerate(kinds):
        key = ("window", number)
        for_s = draws.between(0.5, 10.0, *key, "for") * _HOUR_S
        among = names if what == "reserve" else free[:1] if free else []
        if not among:
            continue
        devices = draws.sample(
            among, draws.number(1, max(1, len(among) // 2), *key, "count"), *key, "devices"
        )
        free = free if what == "reserve" else free[1:]
        when_s = draws.between(0.0, end_s - for_s - _HOUR_S, *key, "when")
        found.append(
            Window(when_s, for_s, what, tuple(devices), f"u{draws.number(0, people - 1, *key, 'who')}")
        )
    return found


def check_week(scenario: Scenario) -> World:
    """Live through ``scenario``, and see that each job has had what it was to have. Return the world."""
    world = check(scenario)
    record = world.ground.record
    if lost := {plan.spec.id for plan in scenario.jobs} - world.outcomes.keys():
        raise record.violated("a job was lost", *sorted(lost))
    had_s = on_devices_s(world)
    for plan in scenario.jobs:
        spec, outcome = plan.spec, world.outcomes[plan.spec.id]
        if outcome.state == "succeeded" and world.safety.newest(spec.id) < plan.boundaries:
            raise record.violated("a job succeeded before its end", spec.id, outcome)
        if spec.time_limit_s and spec.id not in world.safety.own_time.changed:
            if outcome.failure == "time_limit" and had_s[spec.id] < spec.time_limit_s - _LATE_S:
                raise record.violated("a job was ended before its time limit", spec.id, had_s[spec.id])
            leaves = sum(entry.job == spec.id and entry.what == "parked" for entry in record.entries)
            if had_s[spec.id] > spec.time_limit_s + _LATE_S + leaves * (_LEAVES_S + 0.2 * plan.step_s):
                raise record.violated("a job had devices beyond its time limit", spec.id, had_s[spec.id])
    return world


def on_devices_s(world: World) -> dict[str, float]:
    """Return how long each job has had a device, by what its rank 0 was seen to do."""
    found, since_s = defaultdict[str, float](float), dict[str, float]()
    for entry in world.ground.record.entries:
        if entry.what == "on" and isinstance(entry.said, tuple) and entry.said[0] == 0:
            since_s.setdefault(entry.job, entry.when_s)
        elif entry.what == "command ended" or (
            entry.what == "parked" and isinstance(entry.said, tuple) and entry.said[0] == 0
        ):
            found[entry.job] += entry.when_s - since_s.pop(entry.job, entry.when_s)
    return found
