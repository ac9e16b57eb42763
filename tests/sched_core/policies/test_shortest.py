"""Policies that know durations."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.traces.trace import Trace


def run(rows: list[tuple[int, int]], policy: str) -> float:
    """Sum of completion times of (submit, duration) on one device."""
    submit, duration = zip(*rows, strict=True)
    trace = Trace([str(i) for i in range(len(rows))], submit, [1] * len(rows), duration)
    outcome = Simulation(trace, Cluster([1]), make_policy(policy)).run()
    return float((outcome.finish_s - trace.submit_s).sum())


def optimum(rows: list[tuple[int, int]]) -> int:
    """The least sum over all fixed priority orders, one job per unit of time: one of them is best of all."""
    best = None
    for order in permutations(range(len(rows))):
        left = [duration for _, duration in rows]
        now, total = 0, 0
        while any(left):
            ready = [i for i in order if left[i] and rows[i][0] <= now]
            now += 1
            if ready:
                left[ready[0]] -= 1
                if not left[ready[0]]:
                    total += now - rows[ready[0]][0]
        best = total if best is None else min(best, total)
    assert best is not None
    return best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 6)), min_size=1, max_size=5))
def test_srtf_is_optimal_on_one_device(rows: list[tuple[int, int]]) -> None:
    assert run(rows, "srtf") <= optimum(rows)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 6)), min_size=1, max_size=5))
def test_nobody_beats_srtf_on_one_device(rows: list[tuple[int, int]]) -> None:
    best = run(rows, "srtf")
    assert all(run(rows, other) >= best for other in ("fifo", "sjf", "2das", "las", "rr", "gittins"))


def test_srtf_preempts_and_srsf_counts_devices(simulate) -> None:
    rows = [(0, 1, 10), (0, 4, 4), (2, 1, 3)]
    assert simulate(rows, "1x4", "srtf").finish_s.tolist() == [14, 4, 7]
    assert simulate(rows, "1x4", "srsf").finish_s.tolist() == [10, 14, 5]


def test_sjf_does_not_preempt(simulate) -> None:
    outcome = simulate([(0, 1, 10), (1, 1, 8), (2, 1, 1)], "1x1", "sjf")
    assert outcome.finish_s.tolist() == [10, 19, 11]
    assert outcome.preemptions.sum() == 0
