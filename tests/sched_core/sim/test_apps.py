"""Finish-time fairness of apps, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.sim import report
from gpuslice.sched_core.sim.apps import App, apps_of
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.sim.metrics import finish_time_fairness, summary
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.sim.table import render
from gpuslice.sched_core.traces.trace import Trace


def outcome_of(rows: list[tuple[float, int, float, str]], devices: int, policy: str = "fifo") -> Outcome:
    submit, demand, duration, app = zip(*rows, strict=True)
    trace = Trace([str(i) for i in range(len(rows))], submit, demand, duration, {"app": list(app)})
    return Simulation(trace, Cluster([devices]), make_policy(policy)).run()


def test_two_apps_one_after_the_other() -> None:
    """a holds both devices until 10, b from then to 20; N is 2 for a and 1.5 for b."""
    outcome = outcome_of([(0, 1, 10, "a"), (0, 1, 10, "a"), (0, 1, 10, "b"), (0, 1, 10, "b")], 2)
    first, second = apps_of(outcome)
    rho = pytest.approx(10 / 20)
    assert first == App("a", 2, 0.0, 10.0, rho, rho), "both use every device"
    rho = pytest.approx(20 / (20 / (2 / 1.5)))
    assert second == App("b", 2, 0.0, 20.0, rho, rho)


def test_the_papers_rho_of_an_app_that_needs_less_than_its_share() -> None:
    """Each takes 10 s on the whole cluster, and N is 2."""
    found = apps_of(outcome_of([(0, 1, 10, "a"), (0, 1, 10, "b")], 4))
    assert [(app.rho, app.rho_paper) for app in found] == [(1.0, 0.5), (1.0, 0.5)]


def test_an_app_alone_waits_for_its_longest_job_or_for_all_its_work() -> None:
    assert [app.rho for app in apps_of(outcome_of([(0, 1, 30, "a"), (0, 1, 10, "a")], 2))] == [1.0]
    assert [app.rho for app in apps_of(outcome_of([(0, 1, 5, "a")] * 4, 2))] == [1.0]
    assert [app.rho for app in apps_of(outcome_of([(0, 1, 5, "a"), (20, 1, 5, "a")], 2))] == [1.0]


def test_apps_of_one_job_are_as_fair_as_their_jobs() -> None:
    rows = [(0, 2, 7, ""), (1, 4, 10, "x"), (3, 1, 2, ""), (3, 3, 5, "y"), (40, 1, 0, "")]
    outcome = outcome_of([(float(s), d, float(t), a) for s, d, t, a in rows], 4, "srtf")
    expected = finish_time_fairness(outcome)[:4].tolist()
    assert [app.rho for app in apps_of(outcome)] == pytest.approx(expected)


def test_of_a_stopped_job_counts_what_it_did() -> None:
    """Themis' tuner ends the app with its first job, at 10; both ran until then."""
    rows = [(0.0, 1, 10.0, "a"), (0.0, 1, 1000.0, "a")]
    trace = Trace(["0", "1"], *map(list, zip(*[r[:3] for r in rows], strict=True)), {"app": ["a", "a"]})
    outcome = Simulation(trace, Cluster([2]), make_policy("themis", {"tuner": "first"})).run()
    assert apps_of(outcome) == [App("a", 2, 0.0, 10.0, 1.0, 1.0)]


def test_they_are_reported_where_there_are_any(tmp_path: Path) -> None:
    with_apps, without = outcome_of([(0, 1, 10, "a")], 1), outcome_of([(0, 1, 10, "")], 1)
    assert summary(with_apps)["rho_apps"]["max"] == summary(with_apps)["jain_apps"] == 1.0
    assert summary(without)["rho_apps"] is summary(without)["jain_apps"] is None
    assert "max app rho" in render([with_apps])
    assert "max app rho" not in render([without])
    report.write_json([with_apps, without], tmp_path / "out.json")
    policies = json.loads((tmp_path / "out.json").read_text())["policies"]
    assert policies[0]["apps"] == [
        {"app": "a", "num_jobs": 1, "submit_time": 0, "end_time": 10, "rho": 1, "rho_paper": 1}
    ]
    assert policies[1]["apps"] == []
