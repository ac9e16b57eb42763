"""What is done at a boundary: the whole table."""

from __future__ import annotations

from itertools import product

import pytest

from gpuslice.runtime.stopping import Act, Obstacle, Wish, decide

FREE, *OBSTACLES = Obstacle
#: Without an obstacle: by what the controller wishes, and whether the handler of a signal runs.
FREELY = {
    (Wish.NOTHING, False): Act.RUN_ON,
    (Wish.NOTHING, True): Act.RUN_ON,
    (Wish.PARK, False): Act.PARK,
    (Wish.PARK, True): Act.PARK,
    (Wish.PARK_AGAIN, False): Act.PARK,
    (Wish.PARK_AGAIN, True): Act.RUN_ON,
}


@pytest.mark.parametrize(("wish", "in_handler"), [*product(Wish, (False, True))])
def test_a_boundary_without_an_obstacle(wish: Wish, in_handler: bool) -> None:
    assert decide(wish, FREE, in_handler=in_handler) is FREELY[wish, in_handler]


@pytest.mark.parametrize(("wish", "obstacle", "in_handler"), [*product(Wish, OBSTACLES, (False, True))])
def test_a_boundary_at_which_the_job_cannot_be_suspended(
    wish: Wish, obstacle: Obstacle, in_handler: bool
) -> None:
    expected = Act.RUN_ON if wish is Wish.NOTHING else Act.PASS_BY
    assert decide(wish, obstacle, in_handler=in_handler) is expected
