"""Metrics by hand."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policies.wrapper import Wrapper
from gpuslice.sched_core.policy import Plan, View
from gpuslice.sched_core.sim import report
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.sim.metrics import finish_time_fairness, jain, spread, summary
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.sim.table import render, render_validation
from gpuslice.sched_core.sim.validate import read_measured, validate
from gpuslice.sched_core.traces.trace import Trace

Simulate = Callable[..., Outcome]


def test_summary(simulate: Simulate) -> None:
    """0: [0,10) alone on two devices; 1 waits from 4 to 10, then runs to 16."""
    found = summary(simulate([(0, 2, 10), (4, 1, 6)], "1x2", "fifo"))
    assert found["jct_s"]["mean"] == 11
    assert found["jct_s"]["median"] == 11
    assert found["queueing_s"]["max"] == found["queueing_turns_s"]["max"] == 6
    assert found["queueing_fair_share_s"]["max"] == found["queueing_fragmentation_s"]["max"] == 0
    assert found["makespan_s"] == 16
    assert found["utilization"] == pytest.approx(26 / 32)
    assert found["jobs_done"] == 2
    assert found["slowdown"]["max"] == 2
    json.dumps(found, allow_nan=False)


def test_rho_is_one_in_an_idle_cluster(simulate: Simulate) -> None:
    outcome = simulate([(0, 2, 10), (20, 4, 5), (30, 1, 1)], "1x4", "2das")
    assert finish_time_fairness(outcome).tolist() == [1, 1, 1]


def test_rho_against_the_share_of_two(simulate: Simulate) -> None:
    """Two jobs want everything. First come: 10 and 20 s; with half each, both would take 20."""
    outcome = simulate([(0, 4, 10), (0, 4, 10)], "1x4", "fifo")
    assert outcome.contention.tolist() == [2, 1.5]
    assert finish_time_fairness(outcome) == pytest.approx([10 / 20, 20 / 15])


def test_rho_as_the_paper_has_it_is_against_n_times_the_whole_cluster(simulate: Simulate) -> None:
    """Four jobs that each use a quarter: alone on the whole cluster they take 10 s, and N is 4."""
    outcome = simulate([(0, 1, 10)] * 4, "1x4", "fifo")
    assert finish_time_fairness(outcome, times_n=True).tolist() == [0.25] * 4
    found = summary(outcome)
    assert (found["rho"]["max"], found["rho_paper"]["max"]) == (1.0, 0.25)
    wide = simulate([(0, 4, 10), (0, 4, 10)], "1x4", "fifo")
    assert finish_time_fairness(wide, times_n=True) == pytest.approx(finish_time_fairness(wide))


def test_small_jobs_are_not_slowed_by_a_share_that_suffices(simulate: Simulate) -> None:
    outcome = simulate([(0, 1, 10)] * 4, "1x4", "fifo")
    assert finish_time_fairness(outcome).tolist() == [1, 1, 1, 1]


def test_jain() -> None:
    assert jain(np.array([2.0, 2.0, 2.0])) == 1
    assert jain(np.array([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert jain(np.array([0.0])) is None


def test_spread_of_nothing_is_none() -> None:
    assert spread(np.array([np.nan])) is None


def test_deadlines_strict_and_soft() -> None:
    trace = Trace(
        ["a", "b", "c"],
        [0, 0, 0],
        [1, 1, 1],
        [5, 5, 5],
        {"deadlines": [((5.0, 1.0),), ((6.0, 2.0), (10.0, 1.0)), ()]},
    )
    found = summary(Simulation(trace, Cluster([1]), make_policy("fifo")).run())
    assert (found["deadlines"], found["deadline_misses"], found["deadline_misses_soft"]) == (2, 1, 0)


def test_of_an_interrupted_run_only_jobs_that_ended_missed_deadlines() -> None:
    """The first ends late, the second too late even for its last deadline; the others are unfinished."""

    class Interrupting(Wrapper):
        def plan(self, view: View) -> Plan:
            if view.now_s == 10:
                raise KeyboardInterrupt
            return self.policy.plan(view)

    deadlines = [((4.0, 1.0), (6.0, 1.0)), ((6.0, 1.0),), ((90.0, 1.0),), ((90.0, 1.0),)]
    trace = Trace(list("abcd"), [0, 0, 0, 50], [1] * 4, [5] * 4, {"deadlines": deadlines})
    outcome = Simulation(trace, Cluster([1]), Interrupting(make_policy("fifo"))).run()
    found = summary(outcome)
    assert (found["complete"], found["jobs_done"]) == (False, 2)
    assert (found["deadlines"], found["deadline_misses"], found["deadline_misses_soft"]) == (4, 2, 1)


def test_per_job_csv(simulate: Simulate, tmp_path: Path) -> None:
    outcome = simulate([(0, 1, 10), (0.5, 1, 2)], "1x1", "srtf")
    report.write_per_job(outcome, tmp_path / "jobs.csv")
    with (tmp_path / "jobs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:6] == ["job_id", "submit_time", "start_time", "end_time", "preempt", "promote"]
    assert [rows[0][key] for key in ("start_time", "end_time", "preempt")] == ["0", "12", "1"]
    assert [rows[1][key] for key in ("start_time", "end_time", "preempt")] == ["0.5", "2.5", "0"]


def test_json_is_the_same_bytes_twice(simulate: Simulate, tmp_path: Path) -> None:
    for name in ("a", "b"):
        outcomes = [simulate([(0, 1, 10), (1, 2, 3)], "1x2", policy) for policy in ("fifo", "2das")]
        report.write_json(outcomes, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    found = json.loads((tmp_path / "a").read_text())
    assert [policy["summary"]["policy"] for policy in found["policies"]] == ["fifo", "2das"]
    job = found["policies"][0]["jobs"][1]
    assert job["start_time"] == 10
    assert job["placements"] == [{"start": 10, "end": 13, "devices": [0, 1]}]


def test_json_written_job_by_job_is_what_json_would_write(simulate: Simulate, tmp_path: Path) -> None:
    """Also texts that need escapes, jobs that never ran, none at all, and numbers of every length."""
    ids = ['a"b', "é\n", "c"]
    trace = Trace(ids, [0, 0.1, 5], [2, 1, 1], [1e17, 1 / 3, 2], {"app": ["x", "x", ""]})
    outcome = Simulation(trace, Cluster([2]), make_policy("srtf"), keep_spans=True).run()
    other = simulate([(0, 1, 10)], "1x1", "fifo")
    other.finish_s[0] = np.nan
    for outcomes in ([outcome, other], []):
        report.write_json(outcomes, tmp_path / "out.json")
        written = (tmp_path / "out.json").read_text()
        assert written == json.dumps(json.loads(written), indent=1) + "\n"
    assert [list(row.values())[:-1] for row in found_jobs(tmp_path, outcome)] == list(
        map(list, report.per_job(outcome))
    )


def found_jobs(folder: Path, outcome: Outcome) -> list[dict[str, object]]:
    report.write_json([outcome], folder / "one.json")
    jobs: list[dict[str, object]] = json.loads((folder / "one.json").read_text())["policies"][0]["jobs"]
    assert list(jobs[0]) == [*report.PER_JOB_COLUMNS, "placements"]
    return jobs


def test_validation(simulate: Simulate, tmp_path: Path) -> None:
    outcome = simulate([(0, 1, 10), (5, 1, 10)], "1x1", "fifo")
    measured = tmp_path / "measured.csv"
    measured.write_text("job_id,jct\n0,8\n1,20\n")
    found = validate(outcome, read_measured(measured, outcome.trace))
    assert found.errors == pytest.approx({"0": 0.25, "1": -0.25})
    assert found.average_error == pytest.approx(25 / 28 - 1)
    assert "mean absolute error 25.0%" in render_validation(outcome, found)
    measured.write_text("job_id,end_time\n1,25\n")
    found = validate(outcome, read_measured(measured, outcome.trace))
    assert found.errors == pytest.approx({"1": -0.25})
    report.write_json([outcome], tmp_path / "out.json", [found])
    written = json.loads((tmp_path / "out.json").read_text())["policies"][0]["validation"]
    assert written["errors"] == pytest.approx({"1": -0.25})
    measured.write_text("job_id,jct\naverage,10\n")
    assert validate(outcome, read_measured(measured, outcome.trace)).average_error == pytest.approx(0.25)


def test_measured_jobs_that_did_not_end_are_counted(simulate: Simulate, tmp_path: Path) -> None:
    outcome = simulate([(0, 1, 10), (5, 1, 10)], "1x1", "fifo")
    outcome.finish_s[1] = np.nan
    measured = tmp_path / "measured.csv"
    measured.write_text("job_id,jct\n0,8\n1,20\n")
    found = validate(outcome, read_measured(measured, outcome.trace))
    assert (found.missing, found.measured_s) == (1, 8)
    assert "1 measured jobs did not end" in render_validation(outcome, found)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("job_id,jct\n9,8\n", "line 2, column 'job_id': the trace has no job '9'"),
        ("job_id,jct\n0,x\n", "line 2, column 'jct': 'x' is not a number"),
        ("job_id,jct\n0,0\n", "took no time"),
        ("job_id,jct\n", "names no job"),
        ("job_id,jct\n0,8\n0,9\n", "line 3, column 'job_id': job '0' is there twice"),
        ("job_id,jct\naverage,nan\n", "line 2, column 'jct'"),
        ("job,jct\n0,8\n", "no columns job_id"),
        ("", "no columns job_id"),
    ],
)
def test_malformed_measurements(simulate: Simulate, tmp_path: Path, text: str, named: str) -> None:
    measured = tmp_path / "measured.csv"
    measured.write_text(text)
    with pytest.raises(UsageError, match=named):
        read_measured(measured, simulate([(0, 1, 10)], "1x1", "fifo").trace)


def test_table_lines_up(simulate: Simulate) -> None:
    text = render([simulate([(0, 1, 10)], "1x1", policy) for policy in ("fifo", "2das")])
    assert len({len(line) for line in text.splitlines()}) == 1
    assert "100.0%" in text


def test_first_starts_and_completion_times_without_deadlines() -> None:
    deadlines = [((5.0, 1.0),), ()]
    trace = Trace(["a", "b"], [0, 0], [1, 1], [5, 5], {"deadlines": deadlines})
    found = summary(Simulation(trace, Cluster([1]), make_policy("fifo")).run())
    assert found["first_start_s"]["mean"] == 2.5
    assert found["jct_best_effort_s"]["mean"] == 10
    assert found["jct_s"]["mean"] == 7.5


def test_jobs_that_take_no_time_have_no_rho(simulate: Simulate, tmp_path: Path) -> None:
    """They may wait; infinities would spoil the others' numbers and are not JSON."""
    outcome = simulate([(0, 1, 10), (0, 1, 0), (0, 1, 10)], "1x1", "fifo")
    assert np.isnan(finish_time_fairness(outcome)).tolist() == [False, True, False]
    found = summary(outcome)
    assert found["rho"]["max"] == pytest.approx(1.0)
    report.write_json([outcome], tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["policies"][0]["jobs"][1]["rho"] is None
