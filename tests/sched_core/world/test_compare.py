"""Two cores in one world: the same core makes the same of it, and one that acts otherwise is found."""

from __future__ import annotations

import msgspec
import pytest

from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.lifecycle.events import Command, Event, Submitted, Tell
from gpuslice.sched_core.lifecycle.rank_orders import NEVER
from gpuslice.wire import Suspend

from .compare import compare
from .scenario import Scenario, draw_scenario
from .schedulers import todays_core

SEEDS = range(4)


def stops_late(scenario: Scenario) -> Core:
    """Return a core that stops jobs one boundary later."""
    core = todays_core(scenario)
    handle = core.handle

    def one_later(command: Command) -> Command:
        message = command.message if isinstance(command, Tell) else None
        if not isinstance(message, Suspend) or message.stop_at == NEVER:
            return command
        return msgspec.structs.replace(
            command, message=msgspec.structs.replace(message, stop_at=message.stop_at + 1)
        )

    core.handle = lambda event, now: [one_later(command) for command in handle(event, now)]  # type: ignore[method-assign]
    return core


def gives_up(scenario: Scenario) -> Core:
    """Return a core that starts no job again that has failed."""
    core = todays_core(scenario)
    handle = core.handle

    def with_one_attempt(event: Event, now: float) -> list[Command]:
        if isinstance(event, Submitted):
            event = Submitted(msgspec.structs.replace(event.spec, max_restarts=0), event.program)
        return handle(event, now)

    core.handle = with_one_attempt  # type: ignore[method-assign]
    return core


@pytest.mark.parametrize("faults", [False, True])
def test_a_core_makes_the_same_of_the_same_world(faults: bool) -> None:
    for seed in SEEDS:
        scenario = draw_scenario(seed) if faults else draw_scenario(seed).without_faults()
        assert compare(scenario, todays_core, todays_core) == []


def test_where_nothing_goes_wrong_a_single_boundary_is_found() -> None:
    found = [compare(draw_scenario(seed).without_faults(), todays_core, stops_late) for seed in SEEDS]
    assert {difference.what for differences in found for difference in differences} >= {"past"}


def test_where_things_go_wrong_another_end_is_found() -> None:
    found = [compare(draw_scenario(seed), todays_core, gives_up) for seed in range(12)]
    assert {difference.what for differences in found for difference in differences} >= {"end"}
