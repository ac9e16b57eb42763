"""Whatever owners do to jobs that are packed, nobody waits for it."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

import pytest

from gpuslice.sched_core.lifecycle.events import Held, Moved, Released

from .packing_world import COMPUTES, WAITS, World

#: By policy, its options: under these, all jobs make steps in turn.
TURNS: dict[str, Mapping[str, str]] = {
    "rr": {},
    "las": {},
    "gandiva": {},
    "gittins": {"thresholds": "8", "promote": "1"},
}
#: 2das lets nobody go before those that started earlier in the last queue, as long as nobody is promoted.
NO_TURNS: dict[str, Mapping[str, str]] = {"2das": {"thresholds": "8"}, "fifo": {}}

#: How often an owner does something; more often in ``./x soak ends``.
DEEDS = 30 if "GPUSLICE_ENDS" in os.environ else 12


def anything(world: World, seed: int) -> None:
    """What owners of up to six jobs may do, in any order."""
    source = random.Random(seed)
    for number in range(DEEDS):
        live = [job for job in world.driver.core.jobs.values() if not job.state.ended]
        deed = source.choice(["submit", "submit", "end", "hold", "release", "move"])
        if deed == "submit" and len(live) < 6:
            world.submit(f"j{number}", source.choice(["compute", "wait"]))
        elif live and deed == "end":
            world.end(source.choice(live).id)
        elif live and deed == "move":
            world.do(Moved(source.choice(live).id, (f"null:{source.randrange(2)}",)))
        elif held := [job for job in live if job.held is (deed == "release")]:
            world.do((Released if deed == "release" else Held)(source.choice(held).id))
        world.run(source.choice([0.3, 2.0, 9.0]))
    for job in world.driver.core.jobs.values():
        if job.held and not job.state.ended:
            world.do(Released(job.id))


def starving(world: World) -> list[str]:
    """Who makes no step for two minutes, though nobody does anything to it."""
    before = dict(world.steps)
    world.run(120.0)
    live = [job.id for job in world.driver.core.jobs.values() if not job.state.ended]
    return [job for job in live if world.steps[job] == before[job]]


@pytest.mark.parametrize("policy", TURNS)
@pytest.mark.parametrize("seed", [8])
def test_whatever_owners_do_nobody_starves(policy: str, seed: int) -> None:
    world = World(COMPUTES | WAITS, policy, devices=2, options=TURNS[policy])
    anything(world, seed)
    assert not starving(world)
    assert not world.said("policy_failed")


@pytest.mark.parametrize("policy", NO_TURNS)
@pytest.mark.parametrize("seed", [5])
def test_whatever_owners_do_packing_makes_nobody_wait_longer(policy: str, seed: int) -> None:
    waiting = []
    for pack in (True, False):
        world = World(COMPUTES | WAITS, policy, devices=2, options=NO_TURNS[policy], pack=pack)
        anything(world, seed)
        waiting.append(len(starving(world)))
        assert not world.said("policy_failed")
    assert waiting[0] <= waiting[1]
