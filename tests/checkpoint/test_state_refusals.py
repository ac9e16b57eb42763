"""Named state that does not fit, is damaged or cannot be saved is refused by name, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gpuslice.checkpoint import tree as trees
from gpuslice.checkpoint.layout import Layout
from gpuslice.checkpoint.snapshot import open_snapshot
from gpuslice.checkpoint.state import check, describe
from gpuslice.checkpoint.store import JobStore
from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError, UsageError

from .named_state import Net, module_bits, reload, save


def refusals() -> dict[str, tuple[Callable[[], dict[str, object]], Callable[[], dict[str, object]], str]]:
    """What was saved, what is here, and the entry that the message must name."""
    one = lambda *shape: {"m": nn.Linear(*shape)}  # noqa: E731

    def with_optimizer(kind: Any, groups: int) -> dict[str, object]:
        model = nn.Linear(2, 2)
        parameters = [{"params": [p]} for p in model.parameters()] if groups == 2 else model.parameters()
        return {"m": model, "o": kind(parameters)}

    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    return {
        "shape": (lambda: one(2, 3), lambda: one(3, 2), "m.weight"),
        "dtype": (lambda: one(2, 2), lambda: {"m": nn.Linear(2, 2).double()}, "m.weight"),
        "missing": (lambda: one(2, 2), lambda: {"m": nn.Linear(2, 2, bias=False)}, "'bias'"),
        "unexpected": (lambda: {"m": nn.Linear(2, 2, bias=False)}, lambda: one(2, 2), "'bias'"),
        "name": (lambda: one(2, 2), lambda: {"other": nn.Linear(2, 2)}, "'other'"),
        "kind": (lambda: one(2, 2), lambda: {"m": torch.Generator()}, "m is a Generator"),
        "tensor": (lambda: {"m": 3}, lambda: {"m": torch.ones(1)}, "m is a tensor"),
        "untied": (
            lambda: {"m": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))},
            lambda: {"m": tied},
            "m.1.weight",
        ),
        "groups": (
            lambda: with_optimizer(torch.optim.Adam, 1),
            lambda: with_optimizer(torch.optim.Adam, 2),
            "o has other parameter groups",
        ),
        "generator": (
            lambda: {"g": np.random.default_rng(1)},
            lambda: {"g": np.random.Generator(np.random.MT19937(1))},
            "g is a numpy MT19937 generator",
        ),
    }


@pytest.mark.parametrize("name", refusals())
def test_what_does_not_fit_is_refused_and_nothing_changes(store: JobStore, name: str) -> None:
    saved, live, entry = refusals()[name]
    model = nn.Linear(5, 5)
    before = module_bits(model)
    named = {"first": model} | live()
    with pytest.raises(RefusedSnapshotError, match=entry):
        reload(store, {"first": nn.Linear(5, 5)} | saved(), named)
    assert module_bits(model) == before


def test_a_damaged_byte_is_found_before_anything_changes(store: JobStore) -> None:
    saved = {"first": nn.Linear(3, 3), "second": {"t": torch.ones(400_000)}}
    live = {"first": nn.Linear(3, 3), "second": {}}
    before = module_bits(live["first"])  # type: ignore[arg-type]
    snapshot = save(store, saved)
    sid = next(spec.sid for spec in snapshot.tensors if spec.path == "second['t']")
    at = snapshot.path.read_bytes().index(bytes(snapshot.view(sid)))
    with snapshot.path.open("r+b") as file:
        file.seek(at + 999)
        file.write(b"x")
    with open_snapshot(snapshot.path) as opened, pytest.raises(CorruptSnapshotError):
        check(opened, live).apply()
    assert module_bits(live["first"]) == before  # type: ignore[arg-type]


def test_a_capture_that_skips_a_tensor_is_seen(store: JobStore) -> None:
    saved, live = Net(7), Net(0)
    with open_snapshot(save(store, {"m": saved}, skip="m.last.weight").path) as snapshot:
        check(snapshot, {"m": live}).apply()
    assert module_bits(saved) != module_bits(live)


def test_trees_of_other_things_are_refused(store: JobStore) -> None:
    unequal = {"kind": "dict", "keys": ["a", "a"], "items": [{"kind": "value", "value": 1}] * 2}
    beyond = {"kind": "optimizer", "groups": [], "shapes": [[[2]]], "state": {3: unequal}, "shared": {}}
    evil = {"kind": "evil", "index": 1}
    for tree in (
        None,
        [1],
        {"m": {"kind": "tensor"}},
        {"m": evil},
        {"m": unequal},
        {"m": beyond | {"devices": {}}},
    ):
        snapshot = store.begin(Layout(())).publish(trees.encode(tree), [], boundary=1, restartable=True)
        with pytest.raises(RefusedSnapshotError):
            check(snapshot, {"m": torch.ones(1)})
    node = {"kind": "tensor", "index": 5, "device": "cpu", "requires_grad": False, "grad": None}
    snapshot = store.begin(Layout(())).publish(trees.encode({"m": node}), [], boundary=1, restartable=True)
    with pytest.raises(RefusedSnapshotError):
        check(snapshot, {"m": torch.ones(1)})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "thing is an object"),
        ({"a": [lambda: 0]}, r"thing\['a'\]\[0\] is a function"),
        ({object(): 1}, "an object as a key"),
        (np.array([object()]), "an array of object"),
        (torch.ones(1, requires_grad=True) * 2, "thing is part of an autograd graph"),
        (torch.optim.SGD([torch.ones(1)], lr=1.0), "steps parameters that nothing else holds"),
    ],
)
def test_what_cannot_be_saved_is_named(value: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        describe({"thing": value})


def test_a_list_that_contains_itself_is_named() -> None:
    endless: list[Any] = [torch.ones(1)]
    endless.append(endless)
    with pytest.raises(UsageError, match="contain itself"):
        describe({"thing": endless})
