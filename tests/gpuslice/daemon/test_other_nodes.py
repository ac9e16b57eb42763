"""What the agents on other nodes are told about the scheduler's logs; nobody asks Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice.clock import MonotonicClock
from gpuslice.daemon.other_nodes import OtherNodes
from gpuslice.nodes.plan import Answer, Found, Wanted

NODES = (Found("", "1", "head", "127.0.0.1"), Found("b", "2", "b", "127.0.0.1"))


def told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a scheduler tells the agent on b that its logs are known by."""
    asked: list[Wanted] = []

    def ask(others: OtherNodes, word: str, wanted: Wanted) -> Answer:
        asked.append(wanted)
        return Answer(NODES)

    monkeypatch.setattr(OtherNodes, "_ask", ask)
    others = OtherNodes(directory, ["cpu:0"], ray="auto")
    remote = others.open(MonotonicClock())
    others.begin(lambda text: None)
    remote.close()
    return asked[-1].agents["b"].logs


def test_agents_hear_whether_the_logs_are_those_of_the_scheduler_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "s"
    first = told(directory, monkeypatch)
    assert first
    assert told(directory, monkeypatch) == first
    (directory / "logs").rename(directory / "past-1")
    assert told(directory, monkeypatch) not in ("", first)
