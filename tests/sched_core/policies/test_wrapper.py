"""What policies say of themselves, with others around them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest

from gpuslice.errors import ConfigError
from gpuslice.sched_core.policies.gandiva.live_packing import Packing
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policies.trial_pool import TrialPool
from gpuslice.sched_core.policy import Guarantees, Plan, Policy, Shares, View

from .worlds import view

AROUND = [{"trial_nodes": 1}, {"relax_after_s": 60.0}, {"defragment": True}, {"pack": True}]


@pytest.mark.parametrize("options", AROUND)
def test_shares_are_seen_through_what_is_around_a_policy(options: dict[str, object]) -> None:
    policy = make_policy("yarn-cs", options)
    assert isinstance(policy, Shares)
    assert not isinstance(policy, Guarantees)
    copied = deepcopy(policy)
    policy.plan(view("3x4", ("a", 5, 10.0)))  # larger than the pool
    assert isinstance(copied, Shares)
    assert (policy.over_share("", 9), copied.over_share("", 9)) == (True, False)


@pytest.mark.parametrize("options", AROUND)
def test_a_policy_without_shares_has_none_with_others_around_it(options: dict[str, object]) -> None:
    policy = make_policy("fifo", options)
    assert not isinstance(policy, Shares)
    assert not isinstance(policy, Guarantees)


def test_guarantees_are_seen_through_a_pool_for_trials() -> None:
    policy = make_policy("chronus", {"trial_nodes": 1, "solver": "greedy"})
    assert isinstance(policy, Guarantees)
    assert policy.guaranteed("a") is None
    with pytest.raises(ConfigError, match="guarantees deadlines"):
        make_policy("chronus", {"trial_nodes": 1, "pack": True})


class Looks:
    """Keeps the view that it is shown."""

    name = "looks"
    needs_durations = False

    def plan(self, view: View) -> Plan:
        self.view = view
        return Plan()


@pytest.mark.parametrize(
    "around", [lambda policy: TrialPool(policy, 1, 100.0), lambda policy: Packing(policy, 2.0)]
)
def test_the_policy_inside_sees_the_same_world(around: Callable[[Policy], Policy]) -> None:
    inside = Looks()
    policy = around(inside)
    fields = set(View.__slots__) - {"changes", "cluster", "jobs"}
    for _ in range(2):
        seen = view("3x4")
        for name in fields:
            setattr(seen, name, 2.0 if name in ("now_s", "least_slice_s") else object())
        policy.plan(seen)
        assert {name for name in fields if getattr(inside.view, name) is not getattr(seen, name)} == set()
