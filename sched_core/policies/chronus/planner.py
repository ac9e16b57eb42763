"""Admission and plans: the linear program where it can help, and the greedy plan where it cannot.

Source: Chronus (SoCC 2021), section 4.2.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.sched_core.policy import Compute, TaskError

from . import milp
from .leases import LeasePlan, Need, greedy_plan, most_reward

Solver = Literal["auto", "highs", "greedy"]


class Planner:
    """Plans the leases of guaranteed jobs, and counts how each plan was found.

    Parameters
    ----------
    solver
        ``highs``: required; ``auto``: used if installed, else a warning and greedy plans; ``greedy``: never.
    nodes, seconds
        Limits of one solution, see ``milp.solve``.

    Attributes
    ----------
    counters
        Plans by how they were found: ``greedy_best`` (no plan can be better), ``milp`` (proven best),
        ``milp_limit`` (best found within the limits), ``greedy_fallback`` (the solver found none within the
        limits), ``greedy_unsolved`` (there is no solver). The same after ``admission_``.
        ``solver_failed``: solutions that ended in an error.
    solver_version
        Name and version of the solver; empty if there is none to use.
    """

    def __init__(self, solver: Solver, nodes: int, seconds: float) -> None:
        self.solver_version = ""
        self._use_milp = solver != "greedy" and milp.available()
        if solver == "highs" and not self._use_milp:
            raise EnvironmentUnusableError("HiGHS is not installed", "pip install 'gpuslice[plan]'")
        if solver == "auto" and not self._use_milp:
            warnings.warn(
                "HiGHS is not installed: Chronus uses greedy plans; pip install 'gpuslice[plan]'",
                RuntimeWarning,
                stacklevel=2,
            )
        if self._use_milp:
            self.solver_version = milp.version()
        self._limits = (nodes, seconds)
        self.counters: dict[str, int] = {}

    def plan(
        self, needs: Sequence[Need], capacity: int, compute: Compute, *, late: bool = False
    ) -> tuple[LeasePlan, bool]:
        """Return the best plan found so far, and True if no better one is still being computed.

        While one is being computed, the plan is greedy. ``late``: use the first lease little.
        """
        greedy = greedy_plan(needs, capacity, late=late)
        if greedy.reward >= most_reward(needs):
            return self._counted("greedy_best", greedy), True
        if not self._use_milp:
            return self._counted("greedy_unsolved", greedy), True
        solved = self._solved(needs, capacity, compute, start=greedy, late=late)
        if solved is None:
            return greedy, False
        if solved.plan is None or solved.plan.reward < greedy.reward:
            return self._counted("greedy_fallback", greedy), True
        return self._counted("milp" if solved.proven else "milp_limit", solved.plan), True

    def admission(
        self, needs: Sequence[Need], capacity: int, compute: Compute
    ) -> tuple[LeasePlan | None, bool]:
        """Return a plan in which all needs meet a deadline, or None, and True if that answer is final."""
        greedy = greedy_plan(needs, capacity)
        if len(greedy.slots) == len(needs):
            self._count("admission_greedy_best")
            return greedy, True
        if not self._use_milp:
            self._count("admission_greedy_unsolved")
            return None, True
        solved = self._solved(needs, capacity, compute, all_of_them=True)
        if solved is None:
            return None, False
        self._count("admission_milp" if solved.proven else "admission_milp_limit")
        return solved.plan, True

    def _solved(
        self,
        needs: Sequence[Need],
        capacity: int,
        compute: Compute,
        *,
        start: LeasePlan | None = None,
        late: bool = False,
        all_of_them: bool = False,
    ) -> milp.Solved | None:
        nodes, seconds = self._limits
        problem = milp.Problem(tuple(needs), capacity, start, all_of_them, late, nodes, seconds)
        try:
            answer = compute(problem.task())
        except TaskError:  # which was reported; there are greedy plans
            self._count("solver_failed")
            return milp.Solved(None, False)
        return None if answer is None else milp.solution(answer)

    def _counted(self, how: str, plan: LeasePlan) -> LeasePlan:
        self._count(how)
        return plan

    def _count(self, how: str) -> None:
        self.counters[how] = self.counters.get(how, 0) + 1
