"""Multi-resource packing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from gpuslice.errors import ConfigError
from gpuslice.sched_core.policies.tetris import Tetris
from gpuslice.sched_core.traces.trace import Trace

from .worlds import check, same, simulate, trace, traces


@given(traces())
@settings(max_examples=30, deadline=None)
def test_conserves_service_and_devices_and_repeats_itself(jobs: Trace) -> None:
    first = simulate(jobs, Tetris())
    check(first)
    assert same(first, simulate(jobs, Tetris()))


def test_packing_alone_prefers_the_job_that_fills_the_node() -> None:
    jobs = trace((0, 4, 10), (1, 1, 10), (1, 3, 500), (1, 4, 1000))
    assert simulate(jobs, Tetris(shortness=0), "1x4").first_start_s.tolist() == [0, 1010, 1010, 10]


def test_short_work_weighs_against_packing() -> None:
    jobs = trace((0, 4, 10), (1, 1, 10), (1, 3, 500), (1, 4, 1000))
    # At 10 s a = 1/4, 3/4, 1 and p = 10/4, 1500/4, 4000/4; ε = 2 / 1377.5: scores 0.246, 0.206, −0.45.
    assert simulate(jobs, Tetris(), "1x4").first_start_s.tolist() == [0, 10, 10, 510]


def test_cpus_count_like_devices() -> None:
    # Both want one device; the second matches the idle CPUs better.
    jobs = trace((0, 2, 10), (1, 1, 100), (1, 1, 100), cpus=[7, 1, 8])
    outcome = simulate(jobs, Tetris(shortness=0, node_cpus=8), "1x2")
    assert outcome.first_start_s.tolist() == [0, 110, 10]


def test_a_preference_for_long_jobs_is_refused() -> None:
    with pytest.raises(ConfigError, match="shortness=-1"):
        Tetris(shortness=-1)
