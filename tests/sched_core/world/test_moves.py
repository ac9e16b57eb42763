"""Jobs that take turns on two nodes: a move between nodes is worth what it costs, in virtual time."""

from __future__ import annotations

import pytest

from gpuslice.sched_core.job import JobSpec

from . import ranks
from .profiles import Profile
from .scenario import JobPlan, Scenario
from .world import World

_STEP_S = 0.2


def _taking_turns(nodes: tuple[str, ...], per_node: int, policy: str, work_s: float) -> tuple[float, int]:
    """Return when the last of five jobs has ended, and how often jobs have changed their node."""
    jobs = tuple(
        JobPlan(
            JobSpec(id=f"j{number}", submit_s=0.1 * number, devices=1, boundary_timeout_s=0.0),
            boundaries=round(work_s / _STEP_S),
            step_s=_STEP_S,
        )
        for number in range(5)
    )
    world = World(Scenario(0, Profile("turns"), nodes, per_node, policy, jobs=jobs, faults=False))
    world.run()
    ended = [entry.attempt for entry in world.ground.record.entries if entry.what == "command ended"]
    return world.makespan_s, sum(attempt > 0 for attempt in ended)


@pytest.mark.parametrize("policy", ["rr", "las"])
@pytest.mark.parametrize("work_s", [22.0, 60.0])
def test_five_jobs_on_two_nodes_are_nearly_as_fast_as_on_one(
    monkeypatch: pytest.MonkeyPatch, policy: str, work_s: float
) -> None:
    monkeypatch.setattr(ranks, "IMPORT_S", 6.0)
    monkeypatch.setattr(ranks, "SETUP_S", 2.0)
    together_s, _ = _taking_turns(("",), 4, policy, work_s)
    apart_s, moves = _taking_turns(("", "b"), 2, policy, work_s)
    assert apart_s <= 1.3 * together_s
    assert moves <= 1
