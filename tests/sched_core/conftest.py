"""Small traces, and where the test data lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.placement.registry import make_placement
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.traces.trace import Trace

DATA = Path(__file__).resolve().parent.parent / "data"

#: (submit, devices, duration)
Row = tuple[float, int, float]
Simulate = Callable[..., Outcome]


@pytest.fixture
def data() -> Path:
    return DATA


def make_trace(rows: list[Row]) -> Trace:
    """A trace of ``rows``, named by position."""
    submit, demand, duration = zip(*rows, strict=True)
    return Trace([str(i) for i in range(len(rows))], submit, demand, duration)


@pytest.fixture
def simulate() -> Simulate:
    """Run rows or a trace: ``simulate(rows, "1x2", "rr", placement="count", quantum_s=1)``."""

    def run(
        jobs: list[Row] | Trace,
        cluster: str,
        policy: str,
        *,
        placement: str | None = None,
        keep_spans: bool = True,
        **options: object,
    ) -> Outcome:
        trace = jobs if isinstance(jobs, Trace) else make_trace(jobs)
        chosen = make_placement(placement) if placement else None
        built = make_policy(policy, options, chosen)
        return Simulation(trace, Cluster.parse(cluster), built, keep_spans=keep_spans).run()

    return run
