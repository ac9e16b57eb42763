"""Dominant resource fairness, with the example of its paper."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from gpuslice.sched_core.policies.drf import Drf
from gpuslice.sched_core.policy import PolicyError
from gpuslice.sched_core.traces.trace import Trace

from .worlds import check, same, simulate, trace, traces

GIB = 1 << 30


@given(traces())
@settings(max_examples=30, deadline=None)
def test_conserves_service_and_devices_and_repeats_itself(jobs: Trace) -> None:
    first = simulate(jobs, Drf())
    check(first)
    assert same(first, simulate(jobs, Drf()))


def test_the_example_of_the_paper() -> None:
    """NSDI 2011, figure 3: 9 CPUs and 18 GB; tasks of (1 CPU, 4 GB) and (3 CPUs, 1 GB): three against two."""
    rows = [(0, 1, 100)] * 12
    tenants = ["a"] * 6 + ["b"] * 6
    jobs = trace(
        *rows,
        tenant=tenants,
        cpus=[1] * 6 + [3] * 6,
        host_memory_bytes=[4 * GIB] * 6 + [GIB] * 6,
    )
    outcome = simulate(jobs, Drf(node_cpus=9, node_memory_gib=18), "1x50")
    running = [tenant for tenant, start_s in zip(tenants, outcome.first_start_s, strict=True) if start_s == 0]
    assert running == ["a"] * 3 + ["b"] * 2


def test_weights_shift_the_shares() -> None:
    rows = [(0, 1, 100)] * 8
    outcome = simulate(trace(*rows, tenant=["a"] * 4 + ["b"] * 4), Drf(weights="b:3"), "1x4")
    assert (outcome.first_start_s == 0).tolist() == [True, False, False, False, True, True, True, False]


def test_a_job_that_never_fits_is_refused_by_name() -> None:
    with pytest.raises(PolicyError, match=r"job j0 needs 16 CPUs a device; a node has 8"):
        simulate(trace((0, 1, 1), cpus=[16]), Drf(node_cpus=8))
