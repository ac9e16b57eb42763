"""Which nodes are asked for a job's snapshots before they are brought over the agents' sockets."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gpuslice.errors import NodeLostError
from gpuslice.node_agents.ssh_engine import SshEngine
from gpuslice.nodes.plan import Wanted
from gpuslice.nodes.ray_nodes import Node
from gpuslice.nodes.routes import boundaries

THERE = {name: Node(name, name) for name in ("", "b", "c", "d")}


class Carrier:
    """Nodes that have snapshots of these boundaries of rank 0; it keeps who was asked, and in which order."""

    def __init__(self, held: dict[str, list[int]], lost: str = "none") -> None:
        self.held, self.lost = held, lost
        self.started: list[set[str]] = []
        self.asked: list[str] = []

    def start(self, nodes: Any) -> None:
        self.started.append({node.id for node in nodes})

    def call(self, node: Node, method: str, *words: Any) -> bytes:
        assert (method, words) == (boundaries.__name__, ("j", 1))
        if node.id == self.lost:
            raise NodeLostError("gone", "")
        self.asked.append(node.id)
        return bytes([0x91, 0x90 + len(self.held.get(node.id, [])), *self.held.get(node.id, [])])


def asked(carrier: Carrier, source: str, target: str) -> dict[str, Any]:
    """Ask for what is needed to bring a snapshot from ``source`` to ``target``."""
    engine = SshEngine(Wanted(directory="/s", sources=(source,), targets=(target,)))
    return engine._held(cast(Any, carrier), "j", THERE)


def test_only_the_two_nodes_are_asked_and_their_ends_are_started_at_once() -> None:
    carrier = Carrier({"b": [4]})
    assert asked(carrier, "b", "c").keys() == {"b", "c"}
    assert carrier.started == [{"b", "c"}]


@pytest.mark.parametrize(("source", "held"), [("b", {"d": [4]}), ("c", {"c": [1], "d": [4]})])
def test_all_nodes_are_asked_if_the_state_is_not_where_it_should_be_or_that_is_not_known(
    source: str, held: dict[str, list[int]]
) -> None:
    carrier = Carrier(held)
    assert asked(carrier, source, "c").keys() == set(THERE)
    assert carrier.started[-1] == set(THERE) - {source, "c"}


def test_a_node_that_is_lost_is_passed_over_unless_it_is_needed() -> None:
    assert asked(Carrier({"": [4]}, lost="d"), "c", "c").keys() == {"", "b", "c"}
    with pytest.raises(NodeLostError):
        asked(Carrier({"b": [4]}, lost="b"), "b", "c")
