"""The world is tested itself: each fault that the core once had turns one of these worlds red."""

from __future__ import annotations

import pytest

from .put_back import FAULTS, Fault, put_back
from .record import Violation
from .scenario import draw_scenario
from .world import check


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.pair)
def test_a_fault_that_is_put_back_is_found(fault: Fault) -> None:
    scenario = draw_scenario(fault.seed)
    with put_back(fault), pytest.raises(Violation):
        check(scenario)
    check(scenario)
