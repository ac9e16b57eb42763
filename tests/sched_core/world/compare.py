"""Two cores in the same world: where nothing goes wrong they do the same, else they come to the same ends."""

from __future__ import annotations

from typing import NamedTuple

from .scenario import Scenario
from .schedulers import MakeCore, Outcome
from .world import check

#: How far sums may be apart where things go wrong.
_SHARE = 0.05
#: A sum may differ by so much in any case: two slices and what belongs to them.
_SLICES_S, _SWITCHES, _STEPS = 4.0, 2, 4


class Difference(NamedTuple):
    """What the two cores did otherwise: to a job, or to all (empty)."""

    job: str
    what: str
    first: object
    second: object


class Account(NamedTuple):
    """What one core has made of a world.

    Attributes
    ----------
    outcomes
        How each job has ended, and in how many attempts.
    past
        What its ranks and commands did, in order: launches, leases, suspends, resumes, ends.
    steps, switches
        Boundaries that its ranks have passed, and how often they have left a device.
    makespan_s
        When the last job had ended.
    """

    outcomes: dict[str, Outcome]
    past: dict[str, list[tuple[int, str, object]]]
    steps: dict[str, int]
    switches: dict[str, int]
    makespan_s: float


def account(scenario: Scenario, make_core: MakeCore) -> Account:
    """Live through ``scenario`` with a core, and return what it has made of it."""
    world = check(scenario, make_core)
    past = {job: world.ground.record.of(job) for job in world.outcomes}
    switches = {job: sum(what == "parked" for _, what, _ in entries) for job, entries in past.items()}
    steps = {job: world.safety.steps(job) for job in past}
    return Account(world.outcomes, past, steps, switches, world.makespan_s)


def compare(scenario: Scenario, first: MakeCore, second: MakeCore) -> list[Difference]:
    """Return what two cores do otherwise in ``scenario``: by exact rules if nothing goes wrong there."""
    return differences(scenario, account(scenario, first), account(scenario, second))


def differences(scenario: Scenario, one: Account, other: Account) -> list[Difference]:
    """Return what two cores did otherwise, by what each has made of ``scenario``."""
    found = [
        Difference(job, "end", one.outcomes[job], other.outcomes.get(job))
        for job in one.outcomes
        if one.outcomes[job] != other.outcomes.get(job)
    ]
    if scenario.faults:
        return found + _roughly(one, other)
    return found + [
        Difference(job, "past", *_first_apart(one.past[job], other.past[job]))
        for job in one.past
        if one.past[job] != other.past[job]
    ]


def _first_apart(one: list[tuple[int, str, object]], other: list[tuple[int, str, object]]) -> list[object]:
    """Return the first entry of each that the other one does not have there."""
    for left, right in zip(one, other, strict=False):
        if left != right:
            return [left, right]
    return [one[len(other) :][:1], other[len(one) :][:1]]


def _roughly(one: Account, other: Account) -> list[Difference]:
    """Return which sums of the second core are not those of the first, within what chance explains."""
    found: list[Difference] = []
    for job, steps in one.steps.items():
        if abs(other.steps[job] - steps) > max(_SHARE * steps, _STEPS):
            found.append(Difference(job, "steps", steps, other.steps[job]))
    switches, others = sum(one.switches.values()), sum(other.switches.values())
    if others > switches + max(_SHARE * switches, _SWITCHES):
        found.append(Difference("", "switches", switches, others))
    if abs(other.makespan_s - one.makespan_s) > max(_SHARE * one.makespan_s, _SLICES_S):
        found.append(Difference("", "makespan", one.makespan_s, other.makespan_s))
    return found
