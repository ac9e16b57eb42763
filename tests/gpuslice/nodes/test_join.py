"""What is found when an agent joins, and what people are told of each node."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpuslice.cli.node_table import lines, remarks
from gpuslice.daemon.node_reports import NodeReports
from gpuslice.node_agents.preflight import look
from gpuslice.nodes.plan import Found, Remark
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.lifecycle.events import Noted
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.types import DeviceName
from gpuslice.verbs import NodeInfo

FACTS = look(("null:0",), "/")


class Nodes:
    """The reports of this node, of b, and of c, which the preflight has left out."""

    def __init__(self) -> None:
        left_out = Remark("c", "its Python has no torch", "install it there")
        self.reports = NodeReports([Found(name, "", "", "") for name in ("", "b")], "/", [left_out])
        self.notes: list[Noted] = []
        self.reports.note = self.notes.append

    def joins(self, **other: Any) -> str:
        """Node b joins, with facts that are as here but for some. Return why it is left out."""
        facts = msgspec.structs.replace(look(("null:0",), "/"), **other)
        return self.reports.judge("b", msgspec.json.encode(facts), True)

    def rows(self) -> dict[str, NodeInfo]:
        core = Core([DeviceName("null", 0), DeviceName("null", 0).on("b")], RoundRobin())
        return {one.name: one for one in self.reports.nodes(core, None)}


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"gpuslice": "0.0.1"}, "its gpuslice is 0.0.1"),
        ({"torch": "1.13"}, "its torch is 1.13"),
        ({"torch": ""}, "its Python has no torch"),
        ({"problems": (("it has no RAM disk", "mount one"),)}, "it has no RAM disk"),
        ({"devices": (), "lacks": ("it has no cuda:0",)}, "it has no cuda:0"),
    ],
)
def test_a_node_that_does_not_fit_is_left_out_when_it_joins(
    nodes: Nodes, other: dict[str, Any], reason: str
) -> None:
    assert reason in nodes.joins(**other)
    (note,) = nodes.notes
    assert (note.what, note.details["node"]) == ("node_left_out", "b")
    assert note.details["remedy"]
    assert nodes.joins(**other)
    assert len(nodes.notes) == 1  # the same is told once
    assert not nodes.joins()
    assert not nodes.rows()["b"].reason


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"python_version": "3.99"}, "its Python is 3.99"),
        ({"has_directory": False}, "it has no directory /"),
        ({"unix_s": 0.0}, "its clock is"),
        ({"ramdisk_bytes": 1000, "devices": ("cpu:0",)}, "has room for"),
    ],
)
def test_what_people_should_know_does_not_leave_a_node_out(
    nodes: Nodes, other: dict[str, Any], reason: str
) -> None:
    assert nodes.joins(**other) == ""
    (note,) = nodes.notes
    assert note.what == "node_remark"
    assert reason in str(note.details["reason"])


def test_an_agent_that_answers_in_other_words_is_left_out(nodes: Nodes) -> None:
    assert "another version" in nodes.reports.judge("b", b'{"gpuslice": 1}', True)


def test_the_nodes_are_shown_with_what_is_known_of_them(nodes: Nodes) -> None:
    nodes.joins()
    here, other, left_out = nodes.rows().values()
    assert (here.name, here.state, here.devices, here.version) == ("here", "up", ("null:0",), FACTS.gpuslice)
    assert (other.devices, other.version) == (("b/null:0",), FACTS.gpuslice)
    assert other.clock_s is not None
    assert abs(other.clock_s) < 60.0
    assert (left_out.state, left_out.reason) == ("left out", "its Python has no torch")


def test_the_table_is_at_most_100_columns_wide_and_says_what_is_wrong() -> None:
    devices = tuple(f"n/cuda:{number}" for number in range(0, 64, 2))
    jobs = tuple(f"train-{number}" for number in range(40))
    wide = NodeInfo(
        "a-name-of-a-machine-that-is-long", devices, "silent", jobs, 4.0, "1.2.3.dev4", 1 << 40, 1.5
    )
    out = NodeInfo("c", (), "left out", reason="its Python has no torch", remedy="install it there")
    table = lines([wide, out])
    assert max(len("  ".join(cells)) for cells in table) <= 100
    assert list(remarks([wide, out], only_bad=True)) == [
        f"node {wide.name} is silent: nothing has been heard of it for 4.0 s",
        "node c is left out: its Python has no torch; install it there",
    ]
