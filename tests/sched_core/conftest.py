"""Small traces, and where the test data lies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.placement.registry import make_placement
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.traces.trace import Trace

from . import command_record

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


#: True in a soak that draws other events than ``./x test``.
SOAKS = "GPUSLICE_ENDS" in os.environ


@pytest.fixture(autouse=True)
def same_commands(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of the record in which the core has ordered something else than it did.

    Tests of Hypothesis draw other events each time.
    """
    new = request.config.stash.get(command_record.RECORDED, None)
    # What ``./x soak`` draws is not what was recorded.
    name, known = command_record.name_of(request.node), {} if SOAKS else _recorded_commands()
    drawn = request.node.name == "runTest" or getattr(request.function, "is_hypothesis_test", False)
    if drawn or (new is None and name not in known):
        yield
        return
    with command_record.recorded() as record:
        yield
    if new is not None:
        new[name] = record.digest
    elif record.digest != known[name]:
        pytest.fail(
            f"the core ordered something else than recorded, in {record.events} events; if that is meant:"
            " python tests/sched_core/record_commands.py"
        )


@cache
def _recorded_commands() -> command_record.Digests:
    return command_record.read()
