"""One command a node: what each is told, and which end is the job's."""

from __future__ import annotations

import pytest

from gpuslice.sched_core.core.events import Exited
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.nodes.gang_commands import GangEnds, on_node

STANDALONE = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "train.py")


@pytest.mark.parametrize(("node", "number", "count"), [("", "0", "2"), ("b", "1", "1")])
def test_torchrun_is_told_of_the_other_nodes(node: str, number: str, count: str) -> None:
    found = on_node(Program(STANDALONE, "/", {"A": "1"}), ("", "", "b"), node, host="10.0.0.1", attempt="g 0")
    *words, script = found.argv
    assert words[:3] == ["python", "-m", "torch.distributed.run"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    port = options.pop("--master-port")
    assert 20000 <= int(port) < 30000
    assert options == {
        "--nnodes": "2",
        "--node-rank": number,
        "--nproc-per-node": count,
        "--master-addr": "10.0.0.1",
    }
    assert script == "train.py"
    assert found.environ["A"] == "1"
    assert found.environ["PET_NODE_RANK"] == number
    assert (found.environ["MASTER_ADDR"], found.environ["MASTER_PORT"]) == ("10.0.0.1", port)


def test_every_node_is_told_the_same_port_and_every_attempt_another() -> None:
    program = Program(("x",), "/")
    ports = [
        on_node(program, ("", "b"), node, host="h", attempt=f"g {attempt}").environ["MASTER_PORT"]
        for attempt in (0, 1)
        for node in ("", "b")
    ]
    assert ports[0] == ports[1] != ports[2] == ports[3]


def test_a_job_of_one_node_is_started_as_it_is() -> None:
    program = Program(STANDALONE, "/")
    assert on_node(program, ("b", "b", "b"), "b", host="h", attempt="g 0") is program


def test_a_job_has_ended_when_all_its_commands_have() -> None:
    ends = GangEnds()
    ends.begin("g", ("", "b"))
    assert ends.note("", Exited("g", 0)) is None
    assert ends.others("g") == ["b"]
    assert ends.note("b", Exited("g", 0)) == Exited("g", 0)


def test_the_first_failure_is_the_job_s() -> None:
    ends = GangEnds()
    ends.begin("g", ("", "b"))
    assert ends.note("b", Exited("g", 1, "why")) is None
    assert ends.note("", Exited("g", -15)) == Exited("g", 1, "why")
    ends.begin("g", ("",))
    assert ends.note("", Exited("g", 0)) == Exited("g", 0), "of an attempt before nothing is left"
