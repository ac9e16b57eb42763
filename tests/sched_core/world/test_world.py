"""Whole worlds in virtual time: what must hold does, whatever goes wrong, and every job ends at last."""

from __future__ import annotations

import pytest

from .draws import Draws
from .scenario import draw_scenario
from .world import World, check, draw_deaths

WORLDS = 24
#: Worlds in which states are brought and gangs meet, and one in which stays on a node end at heartbeats.
DEADLY = (6, 7, 5272)
#: Worlds in which too much was once asked of the core: to know of a gang of which no rank ever comes, to stop
#: a fast gang sooner than messages travel, and to have the state of a job that is killed before it saves.
ONCE_TOO_STRICT = (200630, 200872, 200980, 700448)
#: A world in which a gang was started on the only node that answered, has no room there, and waited for ever.
NO_ROOM = (126,)


@pytest.mark.parametrize("first", range(0, WORLDS, 8))
def test_whatever_goes_wrong_it_is_safe_and_every_job_ends(first: int) -> None:
    for seed in range(first, first + 8):
        check(draw_scenario(seed))


@pytest.mark.parametrize("seed", ONCE_TOO_STRICT + NO_ROOM)
def test_a_world_asks_for_what_is_possible(seed: int) -> None:
    check(draw_scenario(seed))


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_scheduler_that_dies_at_any_order_to_a_node_has_forgotten_nothing(done: bool) -> None:
    """A state cannot be brought in this world, and a gang has to meet."""
    scenario = draw_scenario(0)
    orders = check(scenario).orders
    for number in range(1, orders + 1):
        check(scenario, deaths={number: done})


def test_a_trial_is_where_a_state_is_that_could_not_be_brought() -> None:
    check(draw_scenario(68).without_faults())


@pytest.mark.parametrize("seed", DEADLY)
def test_schedulers_may_die_at_orders_to_nodes(seed: int) -> None:
    scenario = draw_scenario(seed)
    for deaths in draw_deaths(check(scenario), 3):
        check(scenario, deaths=deaths)


def test_a_scheduler_that_dies_is_followed_by_another_one() -> None:
    world = World(draw_scenario(0), deaths={1: False, 3: True, 5: False})
    world.run()
    ends = [entry for entry in world.ground.record.entries if entry.what == "the scheduler ends"]
    assert len(ends) == 3 + len(world.scenario.restarts)


def test_what_chance_decides_depends_on_what_it_is_for_and_not_on_what_came_before() -> None:
    one, other = Draws(7), Draws(7)
    other.unit("something", "else")
    assert one.unit("a", 0, "suspend", 3) == other.unit("a", 0, "suspend", 3)
    assert one.unit("a", 0, "suspend", 3) != one.unit("a", 0, "suspend", 4)
    assert sum(one.chance(0.3, number) for number in range(1000)) in range(250, 350)
    assert sorted(one.sample("abc", 3, "key")) == ["a", "b", "c"]
