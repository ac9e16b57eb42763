"""Random and small worlds to try policies in, and what must hold in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.knowledge import NoKnowledge
from gpuslice.sched_core.policy import Changes, Plan, Policy, View
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.traces.trace import Trace


def trace(*rows: tuple[float, int, float], **extras: Sequence[Any]) -> Trace:
    """Jobs j0, j1, … of (submit time, devices, duration)."""
    submit_s, demand, duration_s = zip(*rows, strict=True)
    return Trace([f"j{i}" for i in range(len(rows))], submit_s, demand, duration_s, extras)


@st.composite
def traces(draw: st.DrawFn, jobs: int = 12, demands: Sequence[int] = (1, 2, 3, 4, 6)) -> Trace:
    """Small random traces, on which a cluster of 2x4 is busy; tenants, apps, deadlines, sizes included."""
    count = draw(st.integers(1, jobs))
    rows = [
        (draw(st.integers(0, 3000)), draw(st.sampled_from(demands)), draw(st.integers(1, 5000)))
        for _ in range(count)
    ]
    tenants = [draw(st.sampled_from("ab")) for _ in rows]
    apps = [draw(st.sampled_from(["", "x", "y"])) for _ in rows]
    deadlines = [
        draw(st.sampled_from([(), ((1.5 * row[2], 10.0),), ((2.0 * row[2], 10.0), (4.0 * row[2], 3.0))]))
        for row in rows
    ]
    elastic = [draw(st.booleans()) for _ in rows]
    return trace(
        *rows,
        tenant=tenants,
        app=apps,
        deadlines=deadlines,
        least_devices=[1 if e else 0 for e in elastic],
        most_devices=[8 if e else 0 for e in elastic],
    )


def simulate(jobs: Trace, policy: Policy, cluster: str = "2x4", **options: Any) -> Outcome:
    """Run ``jobs`` with spans."""
    return Simulation(jobs, Cluster.parse(cluster), policy, keep_spans=True, **options).run()


def check(outcome: Outcome, *, packing: bool = False) -> None:
    """Every job got what it asked for, no sooner than it came; no device was used twice at once."""
    jobs = outcome.trace
    ended = ~outcome.stopped
    assert not np.isnan(outcome.finish_s).any()
    duration_s = np.array(jobs.duration_s, dtype=float)
    done_s = np.zeros(len(jobs))
    holders: dict[int, list[tuple[float, float]]] = {}
    for span in outcome.spans:
        assert span.start_s >= jobs.submit_s[span.job]
        done_s[span.job] += (span.end_s - span.start_s) * len(span.devices) / jobs.demand[span.job]
        for device in set(span.devices):
            holders.setdefault(device, []).append((span.start_s, span.end_s))
    if packing:
        assert (done_s[ended] >= duration_s[ended] - 1e-6).all()
        return
    np.testing.assert_allclose(done_s[ended], duration_s[ended], rtol=1e-9, atol=1e-6)
    assert (done_s[~ended] <= duration_s[~ended] + 1e-6).all()
    for spans in holders.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def same(first: Outcome, second: Outcome) -> bool:
    """Whether two runs went alike to the last bit."""
    return first.finish_s.tobytes() == second.finish_s.tobytes() and first.spans == second.spans


def jct_s(outcome: Outcome) -> list[float]:
    """Completion times by job."""
    return [float(x) for x in outcome.finish_s - np.array(outcome.trace.submit_s)]


class Forgetful:
    """The policy, which is shown the whole picture anew each time."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.name, self.needs_durations = policy, policy.name, policy.needs_durations

    def plan(self, view: View) -> Plan:
        view.changes = Changes(reset=True)
        return self.policy.plan(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


class Known(NoKnowledge):
    """Durations by job id."""

    def __init__(self, duration_s: dict[str, float]) -> None:
        self._duration_s = duration_s

    def duration_s(self, job: Job) -> float | None:
        return self._duration_s.get(job.id)


def view(cluster: str, *jobs: tuple[str, int, float], now_s: float = 0.0, **fields: Any) -> View:
    """A moment in which jobs of (id, devices, duration) wait; ``fields`` go into every specification."""
    specs = [JobSpec(id=name, submit_s=0.0, devices=demand, **fields) for name, demand, _ in jobs]
    table = {spec.id: Job(spec, number) for number, spec in enumerate(specs)}
    known = Known({name: duration_s for name, _, duration_s in jobs})
    return View(Cluster.parse(cluster), table, known, now_s)
