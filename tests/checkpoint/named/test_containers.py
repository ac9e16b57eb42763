"""Containers and data objects come back as what they were: alone, nested, and where nothing is there."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from gpuslice.checkpoint.format.nodes import KindNode, ValueNode
from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.named.load import Checker
from gpuslice.checkpoint.named.snapshot_tensors import Source
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import RefusedSnapshotError

from ..named_state import reload, save


class Point(NamedTuple):
    x: int
    y: Any


class Phase(Enum):
    WARM = "warm"
    MAIN = 2


class Level(IntEnum):
    LOW = 1


@dataclasses.dataclass
class Record:
    step: int
    losses: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    point: Point


class History(list):  # type: ignore[type-arg]
    best = None


class Window(deque):  # type: ignore[type-arg]
    pass


def history() -> History:
    made = History([1, 2])
    made.best = torch.ones(2)
    return made


VALUES: dict[str, Callable[[], Any]] = {
    "deque": lambda: deque([1, 2, 3], maxlen=3),
    "deque of tensors": lambda: deque([torch.ones(1), torch.zeros(2)], maxlen=5),
    "deque without end": lambda: deque([(1, 2)]),
    "own deque": lambda: Window([1], maxlen=2),
    "ordered": lambda: OrderedDict(b=1, a=torch.ones(1)),
    "default": lambda: defaultdict(list, {"a": [1], 3: [torch.ones(2)]}),
    "counter": lambda: Counter("abca"),
    "set": lambda: {1, (2, "x"), "y", Phase.WARM},
    "frozenset": lambda: frozenset({1.5, None}),
    "named tuple": lambda: Point(1, [torch.ones(1)]),
    "flat named tuple": lambda: Point(1, 2.5),
    "enum": lambda: Phase.MAIN,
    "int enum": lambda: Level.LOW,
    "dataclass": lambda: Record(3, [0.5]),
    "frozen dataclass": lambda: Frozen("a", Point(1, Phase.WARM)),
    "list of its own": history,
    "numpy number": lambda: np.float32(0.1),
    "nested": lambda: {"recent": deque([Record(1), Point(2, deque([Level.LOW], maxlen=1))], maxlen=4)},
}


def alike(first: Any, second: Any) -> bool:
    """Return True if two values are equal and of the same kind throughout."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(alike(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple, deque)):
        same = len(first) == len(second) and all(map(alike, first, second))
        limits = [getattr(one, "maxlen", None) for one in (first, second)]
        return same and limits[0] == limits[1] and alike(_own(first), _own(second))
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first)]
        return all(alike(getattr(first, name), getattr(second, name)) for name in names)
    return bool(first == second)


def _own(value: object) -> dict[str, Any]:
    return dict(getattr(value, "__dict__", {}))


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("there", ["nothing", "another", "a list"])
def test_a_value_keeps_its_kind(store: JobStore, name: str, there: str) -> None:
    live = {"nothing": None, "another": VALUES[name](), "a list": [0]}[there]
    saved = VALUES[name]()
    loaded = reload(store, {"value": saved}, {"value": live})["value"]
    assert alike(loaded, VALUES[name]())
    refilled = there == "another" and isinstance(live, (deque, dict, set, list, Record))
    assert (loaded is live) == (refilled or isinstance(live, Enum))


def test_a_default_factory_of_the_script_s_own_is_kept_by_the_live_dictionary(store: JobStore) -> None:
    def factory() -> list[int]:
        return [7]

    saved: dict[str, Any] = defaultdict(factory, a=[1])
    live: dict[str, Any] = defaultdict(factory)
    loaded = reload(store, {"value": saved}, {"value": live})["value"]
    assert loaded is live
    assert loaded["new"] == [7]
    with pytest.raises(RefusedSnapshotError, match="value is a default dictionary whose factory"):
        reload(store, {"value": saved}, {"value": {}})


def test_a_class_that_only_a_function_has_needs_a_live_object(store: JobStore) -> None:
    class Local(NamedTuple):
        x: int

    assert reload(store, {"value": Local(1)}, {"value": Local(2)})["value"] == Local(1)
    with pytest.raises(RefusedSnapshotError, match=r"value was saved as a .*Local, which is no class"):
        reload(store, {"value": Local(1)}, {"value": None})


def node(kind: str, name: str, data: Any, detail: Any = None) -> KindNode:
    return KindNode(kind, name, ValueNode.of(data, "it"), ValueNode.of(detail, "it"))


OWN = __name__


@pytest.mark.parametrize(
    "forged",
    [
        node("deque", "", 3),
        node("deque", "", [1], -1),
        node("deque", "", [1], "two"),
        node("set", "", [[1]]),
        node("set", "", "text"),
        node("counter", "", [1]),
        node("enum", f"{OWN}:Phase", "COLD"),
        node("enum", f"{OWN}:Record", "WARM"),
        node("named tuple", f"{OWN}:Point", [1]),
        node("named tuple", "builtins:tuple", [1]),
        node("dataclass", f"{OWN}:Record", {3: 1}),
        node("dataclass", "subprocess:Popen", {}),
        node("list", "os:system", []),
        node("list", "os", []),
        node("generator", "", []),
    ],
)
def test_what_no_object_can_be_is_refused_before_anything_changes(store: JobStore, forged: KindNode) -> None:
    with open_snapshot(save(store, {"value": 1}).path) as snapshot, pytest.raises(RefusedSnapshotError):
        Checker(Source(snapshot)).check(forged, None, "value")
