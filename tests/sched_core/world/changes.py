"""Settings that change in a world: the policy, its options, quotas, the switch share and the devices."""

from __future__ import annotations

from dataclasses import replace

from gpuslice.sched_core.lifecycle.events import SettingsChanged

from .draws import Draws
from .policies import NAMES, OPTIONS
from .scenario import CALM_S, Change, Scenario


def with_changes(scenario: Scenario) -> Scenario:
    """Return ``scenario`` with some changes of the scheduler's settings."""
    draws, found = Draws(scenario.seed), list[Change]()
    # Jobs that are submitted later must be possible, too.
    least = max((plan.spec.ranks for plan in scenario.jobs if plan.spec.tenant == "t"), default=1)
    for number in range(draws.number(1, 5, "changes")):
        key = ("change", number)
        when_s = draws.between(1.0, CALM_S - 2.0, *key, "when")
        kinds = ["policy", "policy", "quotas", "switch share"]
        chosen = draws.sample(kinds, draws.number(1, 2, *key, "count"), *key, "kinds")
        policy = draws.choice(NAMES, *key, "policy") if "policy" in chosen else None
        event = SettingsChanged(
            policy,
            None if policy is None else _options(draws, policy, *key),
            draws.choice([{}, {"t": least}, {"t": least + 1}], *key, "quotas")
            if "quotas" in chosen
            else None,
            draws.choice([0.0, 0.03, 0.5], *key, "share") if "switch share" in chosen else None,
        )
        found.append(Change(when_s, event))
    if scenario.nodes == ("",) and not scenario.windows:
        found += _of_devices(draws, scenario)
    return replace(scenario, changes=tuple(sorted(found, key=lambda change: change.when_s)))


def _of_devices(draws: Draws, scenario: Scenario) -> list[Change]:
    """Return changes of devices, enough for each job. In the end there are the first ones again."""
    names = [str(device) for device in scenario.devices]
    least = max(plan.spec.ranks for plan in scenario.jobs)
    there = [*names, *(f"null:{len(names) + number}" for number in range(2))]
    found = [Change(CALM_S - 1.0, SettingsChanged(devices=tuple(names)))]
    for number in range(draws.number(0, 4, "changes of devices")):
        key = ("devices", number)
        count = draws.number(least, len(there), *key, "count")
        event = SettingsChanged(devices=tuple(draws.sample(there, count, *key)))
        found.append(Change(draws.between(1.0, CALM_S - 2.0, *key, "when"), event))
    return found


def _options(draws: Draws, policy: str, *key: object) -> dict[str, str]:
    factor = draws.choice([0.5, 1.0, 3.0], *key, "quantum")
    return {name: str(value * factor) for name, value in OPTIONS.get(policy, {}).items()}
