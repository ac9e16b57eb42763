"""What policies say of themselves, with others around them."""

from __future__ import annotations

from copy import deepcopy

import pytest

from gpuslice.errors import ConfigError
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Guarantees, Shares

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
