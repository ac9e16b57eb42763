"""How often a policy is asked at one moment."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuslice.sched_core.core.events import Command, WakeAt
from gpuslice.sched_core.core.reconciliation import ASK_AGAIN_S, MOST_PLANS, Reconciliation


class Planning:
    """There is reason to ask the policy again after it was asked, so many times."""

    wake_s = None

    def __init__(self, times: float) -> None:
        self.asked, self._times = 0, times

    def ask(self, now: float) -> None:
        self.asked += 1

    @property
    def due(self) -> bool:
        return self.asked <= self._times


@pytest.mark.parametrize(
    ("times", "asked", "woken"),
    [(0, 1, []), (2, 3, []), (inf, MOST_PLANS, [WakeAt(5.0 + ASK_AGAIN_S)])],
)
def test_a_policy_of_many_minds_is_asked_again_later(times: float, asked: int, woken: list[Command]) -> None:
    planning, ordered = Planning(times), list[Command]()
    part = SimpleNamespace(update=lambda now: None, due_s=lambda: inf, report_missed=lambda now: None)
    core = SimpleNamespace(
        planning=planning, trials=part, prestart=part, deadlines=part, order=ordered.append
    )
    Reconciliation(cast(Any, core)).update(5.0)
    assert (planning.asked, ordered) == (asked, woken)
