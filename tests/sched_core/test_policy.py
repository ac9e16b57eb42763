"""The contract of policies, and the one that the documentation shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuslice.errors import ConfigError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.policies.registry import Common, make_policy, policy_options
from gpuslice.sched_core.policy import Changes, Policy, PolicyError, View
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.traces.formats import read_trace

PAGE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


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


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution on the path that names the documented policy, and one that cannot be imported."""
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    (tmp_path / "my_policies.py").write_text(block[1], encoding="utf-8")
    about = tmp_path / "my_policies-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-policies\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[gpuslice.policies]\nfcfs = my_policies:FirstComeFirstServed\nrr = my_policies:Nonsense\n"
        "torn = my_policies:Missing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_policies_of_other_distributions_are_found() -> None:
    assert make_policy("fcfs").name == "fcfs"
    assert policy_options("fcfs") == list(Common.__struct_fields__), "it has none of its own"
    assert type(make_policy("rr")).__name__ == "RoundRobin", "ours cannot be replaced"
    with pytest.raises(ConfigError, match="torn cannot be loaded from my_policies:Missing"):
        make_policy("torn")
    with pytest.raises(ConfigError, match="no policy 'fcsf'") as caught:
        make_policy("fcsf")
    assert "'fcfs'" in caught.value.remedy


def jobs() -> dict[str, Job]:
    found = {name: Job(JobSpec(id=name, submit_s=0.0, devices=2), i) for i, name in enumerate("abc")}
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
