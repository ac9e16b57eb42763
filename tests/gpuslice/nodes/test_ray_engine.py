"""Agents by Ray, without Ray: which actors are started, left alone and ended, and what is said of nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.node_agents import preflight, ray_engine
from gpuslice.node_agents.ray_engine import NAMESPACE, RayEngine
from gpuslice.nodes import ray_nodes
from gpuslice.nodes.plan import Config, Found, Wanted

CONFIG = Config("b", "tcp://127.0.0.1:1", "s", "p", "x")


class Cluster:
    """What the engine uses of Ray. Node a is the scheduler's own.

    Attributes
    ----------
    actors
        The living ones by name, each with what it answers: a process id, an error, or None if it is late.
    started, killed
        Names of those that were.
    answers
        What a new actor on a node answers, by the node's id.
    looks
        What a look at a node finds there.
    """

    def __init__(self) -> None:
        self.rows = [self.row("a", "1"), self.row("b", "2")]
        self.actors: dict[str, Any] = {}
        self.started: list[str] = []
        self.killed: list[str] = []
        self.answers: dict[str, Any] = {"1": 0}
        self.looks: dict[str, Any] = {}
        self.exceptions = SimpleNamespace(RayError=RuntimeError, RayTaskError=NotADirectoryError)
        self.util = SimpleNamespace(
            scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda id, soft: id),
            list_named_actors=lambda all_namespaces: [
                {"name": name, "namespace": NAMESPACE} for name in self.actors
            ],
        )

    @staticmethod
    def row(name: str, id: str) -> dict[str, Any]:
        return {
            "NodeID": id,
            "NodeName": name,
            "NodeManagerAddress": "127.0.0.1",
            "Alive": True,
            "Resources": {"CPU": 2.0},
        }

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "1")

    def nodes(self) -> list[dict[str, Any]]:
        return self.rows

    def remote(self, kind: Any) -> Any:
        if kind is preflight.look:
            return SimpleNamespace(options=lambda **named: self._task(named["scheduling_strategy"]))
        return SimpleNamespace(options=lambda **named: self._actor(**named))

    def _task(self, node: str) -> Any:
        return SimpleNamespace(remote=lambda *words: ("look", self.looks.get(node)))

    def _actor(self, **named: Any) -> Any:
        return SimpleNamespace(remote=lambda *words: self._begin(named["name"], named["scheduling_strategy"]))

    def _begin(self, name: str, node: str) -> Any:
        if name not in self.actors:
            self.actors[name] = self.answers.get(node, 17)
            self.started.append(name)
        return self.get_actor(name, NAMESPACE)

    def get_actor(self, name: str, namespace: str) -> Any:
        answer = self.actors.get(name, KeyError)
        if answer is KeyError:
            raise ValueError(name)
        return SimpleNamespace(name=name, ready=SimpleNamespace(remote=lambda: ("ready", answer)))

    def kill(self, actor: Any, no_restart: bool = False) -> None:
        del self.actors[actor.name]
        self.killed.append(actor.name)

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        ready = [one for one in references if one[1] is not None]
        return ready[:1], [one for one in references if one not in ready[:1]]

    def get(self, reference: Any) -> Any:
        if isinstance(reference[1], Exception):
            raise reference[1]
        return reference[1]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    for module in (ray_engine, ray_nodes):
        monkeypatch.setattr(module, "ray_module", lambda: made)
    return made


def engine(**other: Any) -> RayEngine:
    nodes = (Found("", "1", "a", "127.0.0.1", ("null:0",)), Found("b", "2", "b", "127.0.0.1", ("null:0",)))
    given: dict[str, Any] = {"nodes": nodes, "agents": {"b": CONFIG}}
    return RayEngine(Wanted(devices=("null:0",), directory="/s", **{**given, **other}))


def test_an_actor_that_keeps_what_is_wanted_is_left_alone(cluster: Cluster) -> None:
    for _ in range(2):
        assert [node.name for node in engine().begin().nodes] == ["", "b"]
    assert (len(cluster.started), cluster.killed) == (2, [])


def test_an_actor_that_was_told_something_else_is_ended(cluster: Cluster) -> None:
    engine().begin()
    first = next(name for name in cluster.actors if "-b-" in name)
    engine(agents={"b": Config("b", "tcp://127.0.0.1:2", "s", "p", "x")}).begin()
    assert cluster.killed == [first]
    assert len(cluster.actors) == 2


def test_a_node_that_was_started_again_gets_another_actor(cluster: Cluster) -> None:
    """Ray may not have noted yet that the one of the node's earlier life is gone."""
    engine().begin()
    cluster.rows[1] = Cluster.row("b", "3")
    begun = engine().begin()
    assert [(node.name, node.id) for node in begun.nodes] == [("", "1"), ("b", "3")]
    assert len(cluster.killed) == 1


def test_a_node_that_is_away_is_said_to_be_and_the_others_begin(cluster: Cluster) -> None:
    del cluster.rows[1]
    begun = engine().begin()
    assert [node.name for node in begun.nodes] == [""]
    (remark,) = begun.remarks
    assert (remark.node, remark.left_out) == ("b", True)
    assert "not in the Ray cluster" in remark.reason


def test_a_node_that_ray_does_not_give_in_time_is_left_out_until_it_does(cluster: Cluster) -> None:
    cluster.answers["2"] = None
    begun = engine().begin()
    assert [node.name for node in begun.nodes] == [""]
    (remark,) = begun.remarks
    assert "Ray has not given it" in remark.reason
    assert "ray status" in remark.remedy
    assert not cluster.killed


def test_an_actor_whose_node_does_not_reach_the_scheduler_is_ended(cluster: Cluster) -> None:
    cluster.answers["2"] = EnvironmentUnusableError("it cannot reach the scheduler", "let TCP through")
    (remark,) = engine().begin().remarks
    assert (remark.reason, remark.remedy) == ("it cannot reach the scheduler", "let TCP through")
    assert len(cluster.killed) == 1


def test_a_node_on_which_ray_starts_no_process_is_named_and_used_later(cluster: Cluster) -> None:
    found = engine().find()
    assert [(node.name, node.devices) for node in found.nodes] == [("", ("null:0",)), ("b", None)]
    (remark,) = found.remarks
    assert "Ray has started no process there" in remark.reason
    cluster.answers["2"] = None
    begun = engine(nodes=found.nodes).begin()
    assert ([node.name for node in begun.nodes], begun.remarks) == ([""], ())  # it is known already


def test_a_node_with_a_broken_python_is_left_out(cluster: Cluster) -> None:
    cluster.looks["2"] = ModuleNotFoundError("No module named 'gpuslice'")
    found = engine().find()
    assert [node.name for node in found.nodes] == [""]
    (remark,) = found.remarks
    assert "gpuslice cannot run there: No module named 'gpuslice'" in remark.reason
