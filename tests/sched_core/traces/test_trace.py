"""Traces in memory."""

from __future__ import annotations

from gpuslice.sched_core.traces.trace import Trace


def test_a_trace_in_minutes_as_seconds() -> None:
    extras = {"deadlines": [((5.0, 1.0), (6.0, 0.5)), ()], "weight": [2.0, 3.0]}
    trace = Trace(["a", "b"], [1, 2], [1, 8], [4, 0.5], extras, name="t").in_units_of(60)
    assert (trace.submit_s, trace.duration_s, trace.demand) == ([60, 120], [240, 30], [1, 8])
    assert trace.extras == {"deadlines": [((300.0, 1.0), (360.0, 0.5)), ()], "weight": [2.0, 3.0]}
    assert trace.name == "t"
