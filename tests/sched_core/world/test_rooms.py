"""Worlds with little room for states: no job fails or waits for ever for it, and no place stays idle."""

from __future__ import annotations

import pytest

from gpuslice.sched_core.lifecycle.node_map import NodeMap

from .record import Violation
from .rooms import with_rooms
from .scenario import draw_scenario
from .world import check

#: In each, a gang is on several nodes when another one becomes full, or its owner wants it there.
SPREAD = (45, 147)
#: Without faults a full node was tried again and again, or a plan could not be carried out.
FULL = (7, 31, 133)


@pytest.mark.parametrize("seed", SPREAD)
def test_whatever_goes_wrong_no_job_fails_for_want_of_room(seed: int) -> None:
    check(with_rooms(draw_scenario(seed)))


@pytest.mark.parametrize("seed", FULL)
def test_where_nothing_goes_wrong_no_place_stays_idle(seed: int) -> None:
    check(with_rooms(draw_scenario(seed)).without_faults())


def test_no_node_is_tried_again_that_is_known_to_be_full() -> None:
    world = check(with_rooms(draw_scenario(7)).without_faults())
    found = [entry.what for entry in world.ground.record.entries]
    assert "no room" in found
    assert "found no room" not in found


def test_a_world_notices_a_gang_that_is_told_to_be_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeMap, "_is_spread", lambda nodes, job: False)
    with pytest.raises(Violation, match=r"on several nodes|impossible plan"):
        check(with_rooms(draw_scenario(147)))
