"""The contract of policies, and the one that the documentation shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Changes, Policy, PolicyError, View
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.traces.formats import read_trace

PAGE = Path(__file__).resolve().parents[2] / "docs" / "writing-a-policy.md"


def documented() -> Policy:
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    names: dict[str, type[Policy]] = {"__name__": "documented"}  # type: ignore[dict-item]
    exec(block[1], names)  # noqa: S102 (our own documentation)
    return names["FirstComeFirstServed"]()


def test_the_documented_policy_is_fifo(data: Path) -> None:
    trace = read_trace(data / "traces" / "60_job.csv")
    theirs = Simulation(trace, Cluster.parse("2x4"), documented()).run()
    ours = Simulation(trace, Cluster.parse("2x4"), make_policy("fifo")).run()
    assert theirs.finish_s.tolist() == ours.finish_s.tolist()


def jobs() -> dict[str, Job]:
    found = {name: Job(JobSpec(id=name, submit_s=0.0, demand=2), i) for i, name in enumerate("abc")}
    found["b"].running = True
    found["b"].placement = (0, 3)
    return found


def test_a_view_shows_who_waits_and_what_is_free() -> None:
    view = View(Cluster.parse("2x2"), jobs())
    assert [job.id for job in view.waiting()] == ["a", "c"]
    assert [job.id for job in view.running()] == ["b"]
    assert view.free().on_node == [[1], [2]]
    assert view.changes.reset


def test_durations_need_to_be_known() -> None:
    view = View(Cluster.parse("2x2"), jobs())
    with pytest.raises(PolicyError, match="duration of job a is not known"):
        view.remaining_s(view.jobs["a"])


@pytest.mark.parametrize("name", ["fifo", "fjf", "smallest", "las", "rr", "2das", "gittins"])
def test_after_a_reset_running_jobs_go_on(name: str) -> None:
    """A replayed journal: the policy is new, ``b`` runs, ``a`` and ``c`` wait, two devices are free."""
    policy = make_policy(name)
    view = View(Cluster.parse("2x2"), jobs(), now_s=10.0)
    view.jobs["b"].first_start_s = 0.0
    decisions = policy.plan(view).decisions
    assert [(type(decision).__name__, decision.job) for decision in decisions] in (
        [("Start", "a")],
        [("Suspend", "b"), ("Start", "a"), ("Start", "c")],
        [("Start", "a"), ("Start", "c"), ("Suspend", "b")],
    )
    started = [device for decision in decisions if decision.job != "b" for device in decision.devices]
    assert len(started) == len(set(started))
    view.changes = Changes()
    assert policy.plan(view) is not None
