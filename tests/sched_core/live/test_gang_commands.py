"""One command a node: what each is told."""

from __future__ import annotations

import pytest

from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.nodes.rendezvous import on_node

STANDALONE = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "train.py")


@pytest.mark.parametrize(("node", "number", "count"), [("", "0", "2"), ("b", "1", "1")])
def test_torchrun_is_told_of_the_other_nodes(node: str, number: str, count: str) -> None:
    found = on_node(Program(STANDALONE, "/", {"A": "1"}), ("", "", "b"), node, host="10.0.0.1", port=4242)
    *words, script = found.argv
    assert words[:3] == ["python", "-m", "torch.distributed.run"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options == {
        "--nnodes": "2",
        "--node-rank": number,
        "--nproc-per-node": count,
        "--master-addr": "10.0.0.1",
        "--master-port": "4242",
    }
    assert script == "train.py"
    assert found.environ["A"] == "1"
    assert found.environ["PET_NODE_RANK"] == number
    assert (found.environ["MASTER_ADDR"], found.environ["MASTER_PORT"]) == ("10.0.0.1", "4242")
