"""Locality given up step by step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.errors import ConfigError
from gpuslice.sched_core.placement.placement import Count
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.traces.trace import Trace

from .worlds import check, same, simulate, trace, traces


@given(traces(), st.sampled_from(["fifo", "fjf", "srtf", "2das", "yarn-cs", "drf", "tetris"]))
@settings(max_examples=50, deadline=None)
def test_conserves_service_and_devices_and_repeats_itself(jobs: Trace, name: str) -> None:
    first = simulate(jobs, make_policy(name, {"relax_after_s": 200}))
    check(first)
    assert same(first, simulate(jobs, make_policy(name, {"relax_after_s": 200})))


def test_a_job_accepts_a_second_node_after_a_while() -> None:
    jobs = trace((0, 3, 1000), (0, 3, 1000), (0, 3, 1000), (10, 3, 50))
    outcome = simulate(jobs, make_policy("fifo", {"relax_after_s": 100}), "3x4")
    # Three devices are free from the beginning, each on another node: one step for each node more.
    assert outcome.first_start_s.tolist() == [0, 0, 0, 210]
    assert outcome.spans[0].devices == (3, 7, 11)


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="themis places jobs itself"):
        make_policy("themis", {"relax_after_s": 10})
    with pytest.raises(ConfigError, match="leave out count"):
        make_policy("fifo", {"relax_after_s": 10}, Count())
    with pytest.raises(ConfigError, match="relax_after_s"):
        make_policy("fifo", {"relax_after_s": "soon"})
    with pytest.raises(ConfigError, match=r"relax_after_s=-1"):
        make_policy("fifo", {"relax_after_s": "-1"})
