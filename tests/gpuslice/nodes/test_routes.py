"""Which node sends the snapshot of which rank to which."""

from __future__ import annotations

import pytest

from gpuslice.nodes.routes import Routes, choose

HELD = {"a": ((10, 20), ()), "b": ((), (10, 20)), "c": ((10,), (10,))}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("a", "b"), {}),
        (("a", "c"), {("b", "c"): (1,)}),
        (("c", "c"), {("a", "c"): (0,), ("b", "c"): (1,)}),
        (("b", "a"), {("a", "b"): (0,), ("b", "a"): (1,)}),
    ],
)
def test_each_rank_s_snapshot_goes_from_where_it_is(
    targets: tuple[str, str], expected: dict[tuple[str, str], tuple[int, ...]]
) -> None:
    assert choose(HELD, targets) == Routes(20, expected)


def test_the_newest_boundary_counts_of_which_every_rank_has_one_on_a_node_that_lives() -> None:
    living = {name: HELD[name] for name in ("a", "c")}
    assert choose(living, ("a", "a")) == Routes(10, {("c", "a"): (1,)})
    assert choose({"a": HELD["a"]}, ("a", "a")) is None
    assert choose({}, ("a",)) is None
