"""Nodes that are silent get agents again: when one is asked for, and what people are told meanwhile."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from gpuslice.daemon import agent_revival
from gpuslice.daemon.agent_revival import AgentRevival, Started
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.nodes.plan import Answer, Remark

AWAY = Remark("b", "it is not in the Ray cluster", "start Ray there again")


class Site:
    """A scheduler's nodes b and c, with the time for which each has been silent."""

    def __init__(self) -> None:
        self.silent_s = {"b": 0.0, "c": 0.0}
        self.asked: list[Sequence[str]] = []
        self.answer: Answer | EnvironmentUnusableError = Answer()
        self.missed: dict[str, Remark | None] = {}
        nodes = {name: SimpleNamespace(name=name, misfit="") for name in self.silent_s}
        remote = SimpleNamespace(nodes=nodes, silent_s=lambda node: self.silent_s[node.name])
        reports = SimpleNamespace(missed=self.missed.__setitem__)
        self.revival = AgentRevival(self.begin, cast(Any, remote), cast(Any, reports))

    def begin(self, names: Sequence[str], started: Started) -> Answer:
        self.asked.append(names)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_only_silent_nodes_get_agents_and_after_pauses() -> None:
    site = Site()
    site.revival.look(0.0)
    assert not site.asked
    site.silent_s["b"] = 6.0
    site.revival.look(0.0)
    site.revival.look(0.0)  # the next try is not due yet
    assert site.asked == [["b"]]
    site.silent_s["b"] = 0.0
    site.revival.look(0.0)
    site.silent_s["b"] = 6.0
    site.revival.look(0.0)  # it was there meanwhile
    assert site.asked == [["b"], ["b"]]


def test_people_are_told_what_is_in_the_way_with_a_remedy() -> None:
    site = Site()
    site.silent_s = {"b": 6.0, "c": 6.0}
    site.answer = Answer(remarks=(AWAY,))
    site.revival.look(0.0)
    assert site.missed == {"b": AWAY, "c": None}
    site.answer = EnvironmentUnusableError("no Ray cluster answers", "start one")
    site.revival.look(1e9)
    assert site.missed["c"] == Remark("c", "no Ray cluster answers", "start one")


def test_a_try_that_is_under_way_is_ended_with_the_scheduler(monkeypatch: Any) -> None:
    site = Site()
    begun = threading.Event()

    def begin(names: Sequence[str], started: Started) -> Answer:
        with subprocess.Popen(["sleep", "600"]) as process:
            started(process)
            begun.set()
        return Answer()

    monkeypatch.setattr(agent_revival, "_LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(site.revival, "_begin", begin)
    site.silent_s["b"] = 6.0
    site.revival.start()
    begun.wait()
    site.revival.end(0.0)
    assert not site.revival.is_alive()
