"""Admission and plans: the linear program where it can help, and the greedy plan where it cannot.

Source: Chronus (SoCC 2021), section 4.2.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

from gpuslice.errors import EnvironmentUnusableError

from . import milp
from .leases import LeasePlan, Need, greedy_plan, most_reward

Solver = Literal["auto", "highs", "greedy"]


class Planner:
    """Decides which leases guaranteed jobs hold, and counts how it came to that.

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
    """

    def __init__(self, solver: Solver, nodes: int, seconds: float) -> None:
        self._use_milp = solver != "greedy" and milp.available()
        if solver == "highs" and not self._use_milp:
            raise EnvironmentUnusableError("HiGHS is not installed", "pip install 'gpuslice[plan]'")
        if solver == "auto" and not self._use_milp:
            warnings.warn(
                "HiGHS is not installed: Chronus uses greedy plans; pip install 'gpuslice[plan]'",
                RuntimeWarning,
                stacklevel=2,
            )
        self._limits = (nodes, seconds)
        self.counters: dict[str, int] = {}

    def plan(self, needs: Sequence[Need], capacity: int, *, late: bool = False) -> LeasePlan:
        """The plan with the largest reward that can be found; ``late``: use the first lease little."""
        greedy = greedy_plan(needs, capacity, late=late)
        if greedy.reward >= most_reward(needs):
            return self._counted("greedy_best", greedy)
        if not self._use_milp:
            return self._counted("greedy_unsolved", greedy)
        nodes, seconds = self._limits
        solved = milp.solve(needs, capacity, start=greedy, late=late, nodes=nodes, seconds=seconds)
        if solved.plan is None or solved.plan.reward < greedy.reward:
            return self._counted("greedy_fallback", greedy)
        return self._counted("milp" if solved.proven else "milp_limit", solved.plan)

    def admits(self, guaranteed: Sequence[Need], newcomer: Need, capacity: int) -> bool:
        """Whether some plan lets ``newcomer`` and all ``guaranteed`` jobs meet a deadline."""
        if not newcomer.levels:
            return False
        needs = [*(need for need in guaranteed if need.levels), newcomer]
        greedy = greedy_plan(needs, capacity)
        if len(greedy.slots) == len(needs):
            return self._admission("greedy_best", True)
        if not self._use_milp:
            return self._admission("greedy_unsolved", False)
        nodes, seconds = self._limits
        solved = milp.solve(needs, capacity, all_of_them=True, nodes=nodes, seconds=seconds)
        return self._admission("milp" if solved.proven else "milp_limit", solved.plan is not None)

    def _counted(self, how: str, plan: LeasePlan) -> LeasePlan:
        self.counters[how] = self.counters.get(how, 0) + 1
        return plan

    def _admission(self, how: str, admitted: bool) -> bool:
        self.counters[f"admission_{how}"] = self.counters.get(f"admission_{how}", 0) + 1
        return admitted
