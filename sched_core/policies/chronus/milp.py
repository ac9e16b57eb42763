"""The plan of leases as a mixed-integer linear program, solved by HiGHS (extra ``plan``).

Source: Chronus (SoCC 2021), section 4.2, with its constraint (3) corrected: a lease is full when the *devices
asked for* by its holders are as many as there are; the paper prints their running times.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from gpuslice.sched_core.policy import Task

from .leases import LeasePlan, Need

#: What the use of all devices in the first lease is worth, against rewards scaled to at least 1.
_NOW = 1e-3


class Solved(msgspec.Struct, frozen=True):
    """A plan and whether it is proven best; no plan if none was found, or none exists."""

    plan: LeasePlan | None
    proven: bool


class Problem(msgspec.Struct, frozen=True):
    """The arguments of ``solve`` as one value."""

    needs: tuple[Need, ...]
    capacity: int
    start: LeasePlan | None
    all_of_them: bool
    late: bool
    nodes: int
    seconds: float

    def task(self) -> Task:
        """Return the problem as a task for ``View.compute``.

        `solution` decodes its answer.
        """
        return Task(f"{__name__}:{answer.__name__}", msgspec.msgpack.encode(self))


def answer(problem: bytes) -> bytes:
    """Solve the problem of ``Problem.task`` and return the answer as bytes."""
    asked = msgspec.msgpack.decode(problem, type=Problem)
    solved = solve(
        asked.needs,
        asked.capacity,
        start=asked.start,
        all_of_them=asked.all_of_them,
        late=asked.late,
        nodes=asked.nodes,
        seconds=asked.seconds,
    )
    return msgspec.msgpack.encode(solved)


def solution(answer: bytes) -> Solved:
    """Decode an answer of `answer`."""
    return msgspec.msgpack.decode(answer, type=Solved)


def available() -> bool:
    """Return True if HiGHS is installed."""
    return importlib.util.find_spec("highspy") is not None


def version() -> str:
    """Return the version of HiGHS.

    Another version may choose another of several equally good plans.
    """
    return f"highspy {importlib.metadata.version('highspy')}"


def solve(
    needs: Sequence[Need],
    capacity: int,
    *,
    start: LeasePlan | None = None,
    all_of_them: bool = False,
    late: bool = False,
    nodes: int = 200,
    seconds: float = 0.0,
) -> Solved:
    """Return the plan that maximizes the sum of rewards, found by HiGHS.

    Parameters
    ----------
    needs
        Jobs and their levels.
    capacity
        Devices of each lease.
    start
        A feasible plan to begin with.
    all_of_them
        Every job must meet one of its levels; used for admission.
    late
        Of equal plans, prefer one that uses the first lease little instead of much.
    nodes
        Branch-and-bound nodes after which the best plan so far is returned: the same on every run, unlike
        a time.
    seconds
        Wall-clock limit besides; 0: none. With one, plans may differ from run to run.
    """
    model = _Model([need for need in needs if need.levels], capacity, all_of_them=all_of_them, late=late)
    if all_of_them and len(model.needs) < len(needs):
        return Solved(None, True)
    if not model.needs:
        return Solved(LeasePlan({}, 0.0), True)
    return model.solve(start, nodes, seconds)


class _Model:
    """Columns: x[j, k] (job j holds lease k), then S[j, v] (job j meets level v). All binary."""

    def __init__(self, needs: Sequence[Need], capacity: int, *, all_of_them: bool, late: bool) -> None:
        self.needs = needs
        self._held: list[dict[int, int]] = []
        self._met: list[list[int]] = []
        columns = 0
        for need in needs:
            width = max(level.before for level in need.levels)
            self._held.append({slot: columns + slot for slot in range(width)})
            columns += width
        for need in needs:
            self._met.append(list(range(columns, columns + len(need.levels))))
            columns += len(need.levels)
        self._cost = np.zeros(columns)
        self._rows: list[tuple[float, float, list[int], list[float]]] = []
        self._state(capacity, all_of_them, -_NOW if late else _NOW)

    def _state(self, capacity: int, all_of_them: bool, now: float) -> None:
        values = [level.value for need in self.needs for level in need.levels if level.value > 0]
        smallest = min(values, default=1.0)
        by_slot: dict[int, tuple[list[int], list[float]]] = {}
        for need, held, met in zip(self.needs, self._held, self._met, strict=True):
            for level, column in zip(need.levels, met, strict=True):
                self._cost[column] = level.value / smallest
                within = [held[slot] for slot in range(level.before)]
                weights = [1.0] * len(within) + [-float(level.leases)]
                self._rows.append((0.0, np.inf, [*within, column], weights))
            self._rows.append((float(all_of_them), 1.0, met, [1.0] * len(met)))
            most = max(level.leases for level in need.levels)
            self._rows.append((0.0, float(most), list(held.values()), [1.0] * len(held)))
            for slot, column in held.items():
                columns, sizes = by_slot.setdefault(slot, ([], []))
                columns.append(column)
                sizes.append(float(need.devices))
            if 0 in held:
                self._cost[held[0]] = now * need.devices / capacity
        for columns, sizes in by_slot.values():
            self._rows.append((0.0, float(capacity), columns, sizes))

    def solve(self, start: LeasePlan | None, nodes: int, seconds: float) -> Solved:
        import highspy

        solver = _silent(highspy)
        options: dict[str, bool | int | float | str] = {
            "parallel": "off",
            "threads": 1,
            "random_seed": 0,
            "mip_max_nodes": nodes,
            "mip_rel_gap": 1e-6,
        }
        if seconds > 0:
            options["time_limit"] = seconds
        for name, value in options.items():
            solver.setOptionValue(name, value)
        solver.passModel(self._program(highspy))
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = self._encoded(start)
            solver.setSolution(solution)
        solver.run()
        proven = solver.getModelStatus() in (
            highspy.HighsModelStatus.kOptimal,
            highspy.HighsModelStatus.kInfeasible,
        )
        if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return Solved(None, proven)
        return Solved(self._decoded(np.asarray(solver.getSolution().col_value)), proven)

    def _program(self, highspy: Any) -> Any:
        program = highspy.HighsLp()
        program.num_col_ = len(self._cost)
        program.num_row_ = len(self._rows)
        program.sense_ = highspy.ObjSense.kMaximize
        program.col_cost_ = self._cost
        program.col_lower_ = np.zeros(len(self._cost))
        program.col_upper_ = np.ones(len(self._cost))
        program.integrality_ = [highspy.HighsVarType.kInteger] * len(self._cost)
        program.row_lower_ = np.array([row[0] for row in self._rows])
        program.row_upper_ = np.array([row[1] for row in self._rows])
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *(len(row[2]) for row in self._rows)])
        matrix.index_ = np.array([column for row in self._rows for column in row[2]])
        matrix.value_ = np.array([value for row in self._rows for value in row[3]])
        return program

    def _encoded(self, plan: LeasePlan) -> list[float]:
        values = np.zeros(len(self._cost))
        for need, held, met in zip(self.needs, self._held, self._met, strict=True):
            slots = plan.slots.get(need.job)
            if slots is None:
                continue
            values[[held[slot] for slot in slots]] = 1.0
            values[met[_level(need, slots)]] = 1.0
        return list(values)

    def _decoded(self, values: Any) -> LeasePlan:
        slots: dict[str, tuple[int, ...]] = {}
        reward = 0.0
        for need, held, met in zip(self.needs, self._held, self._met, strict=True):
            if any(values[column] > 0.5 for column in met):
                slots[need.job] = tuple(slot for slot, column in held.items() if values[column] > 0.5)
                reward += need.levels[_level(need, slots[need.job])].value
        return LeasePlan(slots, reward)


def _silent(highspy: Any) -> Any:
    """Return a solver that writes nothing to stdout, where a table may be printed."""

    class Silent(highspy.Highs):  # type: ignore[misc]
        def enableCallbacks(self) -> None:
            """Do nothing.

            The constructor calls this method, which would print a banner.
            """

    solver = Silent()
    solver.setOptionValue("output_flag", False)
    return solver


def _level(need: Need, slots: Sequence[int]) -> int:
    """Return the most rewarding level that a job meets with the leases ``slots``."""
    return next(
        index
        for index, level in enumerate(need.levels)
        if sum(slot < level.before for slot in slots) >= level.leases
    )
