"""Plans of leases: greedy, linear program, admission, against brute force."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.sched_core.policies.chronus import milp
from gpuslice.sched_core.policies.chronus.leases import LeasePlan, Level, Need, greedy_plan, need_of
from gpuslice.sched_core.policies.chronus.planner import Planner
from gpuslice.sched_core.policy import Task

from ...patience import PATIENCE_S

CAPACITY = 4


@st.composite
def needs(draw: st.DrawFn) -> list[Need]:
    found = []
    for number in range(draw(st.integers(1, 4))):
        levels = []
        leases = draw(st.integers(1, 2))
        for before in sorted(draw(st.sets(st.integers(leases, 4), min_size=1, max_size=2))):
            levels.append(Level(before, leases, float(10 - 2 * before)))
        found.append(Need(f"j{number}", draw(st.sampled_from([1, 2, 4])), tuple(levels)))
    return found


def best_reward(needs: Sequence[Need], used: tuple[int, ...] = (0, 0, 0, 0)) -> float:
    """The largest sum of rewards, by trying everything."""
    if not needs:
        return 0.0
    first, rest = needs[0], needs[1:]
    best = best_reward(rest, used)
    for level in first.levels:
        for slots in combinations(range(level.before), level.leases):
            after = tuple(u + first.devices * (slot in slots) for slot, u in enumerate(used))
            if max(after) <= CAPACITY:
                best = max(best, level.value + best_reward(rest, after))
    return best


def assert_feasible(needs: Sequence[Need], plan: LeasePlan) -> None:
    used: dict[int, int] = {}
    reward = 0.0
    for need in needs:
        slots = plan.slots.get(need.job)
        if slots is None:
            continue
        met = [lv.value for lv in need.levels if sum(slot < lv.before for slot in slots) >= lv.leases]
        reward += max(met)
        for slot in slots:
            used[slot] = used.get(slot, 0) + need.devices
    assert max(used.values(), default=0) <= CAPACITY
    assert plan.reward == pytest.approx(reward)


@given(needs(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_program_equals_brute_force(needs: list[Need], late: bool) -> None:
    solved = milp.solve(needs, CAPACITY, start=greedy_plan(needs, CAPACITY), late=late)
    assert solved.plan is not None
    assert solved.proven
    assert_feasible(needs, solved.plan)
    assert solved.plan.reward == pytest.approx(best_reward(needs))
    assert solved == milp.solve(needs, CAPACITY, start=greedy_plan(needs, CAPACITY), late=late)


@given(needs(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_greedy_plan_is_feasible_and_never_better_than_the_best(needs: list[Need], late: bool) -> None:
    plan = greedy_plan(needs, CAPACITY, late=late)
    assert_feasible(needs, plan)
    assert plan.reward <= best_reward(needs) + 1e-9


@given(needs())
@settings(max_examples=40, deadline=None)
def test_admission_is_right_whenever_all_can_be_met(needs: list[Need]) -> None:
    strict = [Need(need.job, need.devices, need.levels[:1]) for need in needs]
    possible = best_reward(strict) == pytest.approx(sum(need.levels[0].value for need in strict))
    assert (Planner("highs", 200, 0.0).admission(strict, CAPACITY, Task.compute)[0] is not None) == possible


def test_capacity_counts_devices_and_not_running_times() -> None:
    # The constraint as printed would let two jobs of one lease each share a lease of one unit of time.
    needs = [Need("a", 3, (Level(1, 1, 1.0),)), Need("b", 3, (Level(1, 1, 1.0),))]
    plan = milp.solve(needs, CAPACITY).plan
    assert plan is not None
    assert len(plan.slots) == 1


def test_the_program_finds_what_no_greedy_order_finds() -> None:
    # a fills lease 0 but for one device, and b and c cannot both do without lease 0: dropping a is best.
    needs = [
        Need("a", 3, (Level(1, 1, 5.0),)),
        Need("b", 2, (Level(2, 2, 5.0),)),
        Need("c", 2, (Level(3, 3, 5.0),)),
    ]
    assert greedy_plan(needs, CAPACITY).reward == 5.0
    planner = Planner("highs", 200, 0.0)
    assert planner.plan(needs, CAPACITY, Task.compute)[0].reward == best_reward(needs) == 10.0
    assert planner.counters == {"milp": 1}


def test_a_soft_deadline_falls_to_the_step_that_can_be_met() -> None:
    need = need_of("a", 1, 100.0, [(150.0, 9.0), (320.0, 4.0)], lease_s=50.0, horizon=10)
    assert need.levels == (Level(3, 2, 9.0), Level(6, 2, 4.0))
    late = need_of("a", 1, 200.0, [(150.0, 9.0), (320.0, 4.0)], lease_s=50.0, horizon=10)
    assert late.levels == (Level(6, 4, 4.0),)


def test_beyond_the_horizon_work_may_wait() -> None:
    need = need_of("a", 1, 500.0, [(1000.0, 1.0)], lease_s=50.0, horizon=12)
    # 10 of 20 leases are needed; 8 of them lie beyond the 12 that are planned.
    assert need.levels == (Level(12, 2, 1.0),)


def test_without_a_solver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milp, "available", lambda: False)
    with pytest.warns(RuntimeWarning, match="HiGHS is not installed"):
        planner = Planner("auto", 200, 0.0)
    crowded = [Need(name, 4, (Level(1, 1, 1.0),)) for name in "ab"]
    assert planner.plan(crowded, CAPACITY, Task.compute)[0].reward == 1.0
    assert planner.counters == {"greedy_unsolved": 1}
    with pytest.raises(EnvironmentUnusableError, match="plan"):
        Planner("highs", 200, 0.0)


def test_a_search_that_finds_nothing_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milp, "solve", lambda *_, **__: milp.Solved(None, False))
    planner = Planner("highs", 200, 0.0)
    crowded = [Need(name, 4, (Level(1, 1, 1.0),)) for name in "ab"]
    assert planner.plan(crowded, CAPACITY, Task.compute)[0].reward == 1.0
    assert planner.counters == {"greedy_fallback": 1}


def test_the_solver_writes_nothing_to_stdout() -> None:
    """Its banner, printed when the first solver is made, would stand in the table of results."""
    script = (
        "from gpuslice.sched_core.policies.chronus.leases import Level, Need\n"
        "from gpuslice.sched_core.policies.chronus.milp import solve\n"
        "assert solve([Need('a', 1, (Level(2, 1, 5.0),))], 4).plan.reward == 5.0\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=PATIENCE_S)
    assert ran.stdout == b""


def test_the_solver_is_named_with_its_version() -> None:
    assert Planner("highs", 200, 0.0).solver_version == f"highspy {version('highspy')}"
    assert Planner("greedy", 200, 0.0).solver_version == ""
