"""Attributes that change after attach are saved by name and put back, or what cannot be is named."""

from __future__ import annotations

import io
import itertools
import logging
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gpuslice.checkpoint.attributes import kinds
from gpuslice.checkpoint.attributes.changes import Changes
from gpuslice.checkpoint.attributes.job_attributes import ATTRIBUTES
from gpuslice.checkpoint.attributes.known import KnownAttributes
from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.named.state import check
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import RefusedSnapshotError

from ..named_state import save


class Holder:
    """An attached object: a callback of some script."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Slots:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, [1]


class Helper:
    def __init__(self) -> None:
        self.count, self.inner = 0, Slots()

    def method(self) -> None:
        self.count += 1


def function_with_variables() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def changed_since(holder: Holder, change: Callable[[Holder], object]) -> Changes:
    known = KnownAttributes({"holder": holder})
    change(holder)
    return known.changes({"holder": holder})


def put_back(store: JobStore, changes: Changes, fresh: Holder) -> None:
    with open_snapshot(save(store, {ATTRIBUTES: changes}).path) as snapshot:
        known = KnownAttributes({"holder": fresh})
        restoration = check(snapshot, {ATTRIBUTES: known})
        known.revert({"holder": fresh})
        restoration.apply()


def set_(**values: Any) -> Callable[[Holder], None]:
    return lambda holder: vars(holder).update(values)


def cyclic(holder: Holder) -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    holder.x = {"ring": ring, "same": ring}


def unequal_keys(holder: Holder) -> None:
    key = torch.ones(1)
    holder.x = {key: "a", "b": key}


#: What a holder has, what changes, and what its fresh counterpart must be in the end.
KEPT: dict[str, tuple[dict[str, Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "number": ({"x": 1}, set_(x=2), lambda h: h.x == 2),
    "kind of number": ({"x": 1}, set_(x=True), lambda h: h.x is True),
    "minus zero": ({"x": 0.0}, set_(x=-0.0), lambda h: str(h.x) == "-0.0"),
    "new attribute": ({}, set_(x="text"), lambda h: h.x == "text"),
    "attribute that goes": ({"x": 1}, lambda h: vars(h).pop("x"), lambda h: not hasattr(h, "x")),
    "list": ({"x": [1]}, lambda h: h.x.append(2), lambda h: h.x == [1, 2]),
    "list of 1000": ({"x": list(range(1000))}, lambda h: h.x.reverse(), lambda h: h.x[0] == 999),
    "lists in a long list": (
        {"x": [[i] for i in range(999)]},
        lambda h: h.x[7].append(1),
        lambda h: h.x[7] == [7, 1],
    ),
    "deque": ({"x": deque([1], maxlen=2)}, lambda h: h.x.extend((2, 3)), lambda h: h.x == deque([2, 3], 2)),
    "new deque": ({"x": None}, set_(x=deque([1], maxlen=2)), lambda h: h.x.maxlen == 2),
    "set": ({"x": {1}}, lambda h: h.x.add("a"), lambda h: h.x == {1, "a"}),
    "dict": ({"x": {}}, lambda h: h.x.update(a=[1]), lambda h: h.x == {"a": [1]}),
    "dict by tensor": ({}, unequal_keys, lambda h: next(iter(h.x)) is h.x["b"]),
    "cycle": ({}, cyclic, lambda h: h.x["ring"][1] is h.x["ring"] is h.x["same"]),
    "tensor": ({"x": torch.zeros(2)}, lambda h: h.x.add_(1), lambda h: h.x.tolist() == [1, 1]),
    "through data": ({"x": torch.zeros(2)}, lambda h: h.x.data.add_(1), lambda h: h.x.tolist() == [1, 1]),
    "through numpy": (
        {"x": torch.zeros(2)},
        lambda h: h.x.numpy().__setitem__(0, 5),
        lambda h: h.x.tolist() == [5, 0],
    ),
    "new tensors in one memory": (
        {},
        lambda h: set_(x=(y := torch.zeros(3)), y=y[1:])(h),
        lambda h: h.y.add_(1) is h.y and h.x[1] == 1,
    ),
    "array": ({"x": np.zeros(2)}, lambda h: h.x.__setitem__(0, 3), lambda h: h.x.tolist() == [3, 0]),
    "helper": ({"x": Helper()}, lambda h: h.x.method(), lambda h: h.x.count == 1),
    "slots": ({"x": Helper()}, lambda h: h.x.inner.b.append(2), lambda h: h.x.inner.b == [1, 2]),
    "replaced helper": (
        {"x": Slots()},
        lambda h: (set_(x=Slots())(h), setattr(h.x, "a", 7)),
        lambda h: h.x.a == 7,
    ),
    "torch generator": (
        {"x": torch.Generator()},
        lambda h: h.x.manual_seed(9),
        lambda h: h.x.initial_seed() == 9,
    ),
    "random": (
        {"x": random.Random(1)},
        lambda h: h.x.seed(4),
        lambda h: h.x.random() == random.Random(4).random(),
    ),
    "new numpy generator": (
        {"x": None},
        lambda h: set_(x=np.random.default_rng(3))(h),
        lambda h: h.x.random() == np.random.default_rng(3).random(),
    ),
    "variable of a closure": ({"x": function_with_variables()}, lambda h: h.x(), lambda h: h.x() == 2),
    "attribute of a function": (
        {"x": function_with_variables()},
        lambda h: setattr(h.x, "n", 3),
        lambda h: h.x.n == 3,
    ),
    "what a method is bound to": ({"x": Helper().method}, lambda h: h.x(), lambda h: h.x.__self__.count == 1),
    "what a partial holds": ({"x": partial(max, [1])}, lambda h: h.x.args[0].append(5), lambda h: h.x() == 5),
    "parameter of an optimizer": (
        {"x": torch.optim.SGD([torch.zeros(1)], lr=0.1)},
        lambda h: h.x.param_groups[0]["params"][0].add_(2),
        lambda h: h.x.param_groups[0]["params"][0].item() == 2,
    ),
    "optimizer": (
        {"x": torch.optim.SGD([torch.zeros(1)], lr=0.1)},
        lambda h: h.x.param_groups[0].update(lr=3.0),
        lambda h: h.x.param_groups[0]["lr"] == 3.0,
    ),
    "module": (
        {"x": torch.nn.Linear(1, 1)},
        lambda h: h.x.weight.data.fill_(4),
        lambda h: h.x.weight.item() == 4,
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_changes_is_put_back(store: JobStore, name: str) -> None:
    _, change, holds = KEPT[name]
    fresh = copy_of(name)
    changes = changed_since(copy_of(name), change)
    assert changes.obstacles == []
    put_back(store, changes, fresh)
    assert holds(fresh)


def copy_of(name: str) -> Holder:
    """Return a holder with attributes of its own, as another process would build it."""
    made: dict[str, Any] = {}
    for key, value in KEPT[name][0].items():
        made[key] = function_with_variables() if isinstance(value, types.FunctionType) else _new(value)
    return Holder(**made)


def _new(value: Any) -> Any:
    import copy

    if isinstance(value, torch.Generator):
        return torch.Generator()
    return copy.deepcopy(value)


def generator() -> Any:
    yield from range(9)


def started(one: Any) -> Any:
    next(one)
    return one


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Any], object], str]] = {
    "iterator": (lambda: {"x": iter([1, 2])}, lambda h: next(h.x), "x is a list_iterator, which has changed"),
    "zip": (lambda: {"x": zip([1], [2], strict=True)}, lambda h: None, "x is a zip, whose state cannot"),
    "count": (lambda: {"x": itertools.count()}, lambda h: next(h.x), "x is a count, which has changed"),
    "generator": (lambda: {"x": generator()}, lambda h: next(h.x), "x is a generator, whose state cannot"),
    "running generator": (lambda: {"x": started(generator())}, lambda h: None, "x is a generator, whose"),
    "new generator": (
        lambda: {"x": None},
        lambda h: set_(x=generator())(h),
        "x is a generator, which cannot",
    ),
    "file": (lambda: {"x": io.StringIO("ab")}, lambda h: h.x.read(1), "x is a StringIO, which has changed"),
    "function": (lambda: {"x": len}, lambda h: set_(x=changed_since)(h), "x is the function changed_since"),
    "new helper": (lambda: {"x": []}, lambda h: h.x.append(Helper()), r"x\[0\] is a Helper, which was made"),
    "new optimizer": (
        dict,
        lambda h: set_(x=torch.optim.SGD([torch.zeros(1)], lr=1.0))(h),
        "x is a SGD, which was made",
    ),
    "graph": (
        dict,
        lambda h: set_(x=torch.ones(1, requires_grad=True).exp())(h),
        "part of an autograd graph",
    ),
    "bits": (
        lambda: {"x": np.random.PCG64(1)},
        lambda h: h.x.random_raw(),
        "x is a PCG64, which has",
    ),
    "id": (lambda: {"y": Helper()}, lambda h: set_(x={id(h.y): 1})(h), r"the id\(\) of holder.y as a key"),
    "array of objects": (
        lambda: {"x": np.array([None, "a"])},
        lambda h: h.x.__setitem__(0, "b"),
        "x is an array of object",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_is_named(name: str) -> None:
    make, change, words = REFUSED[name]
    obstacles = changed_since(Holder(**make()), change).obstacles
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(obstacles)


def ordinary(tmp_path: Path) -> Holder:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LSTM(2, 2), torch.nn.MultiheadAttention(2, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    schedules = torch.optim.lr_scheduler
    return Holder(
        model=model,
        schedule=schedules.SequentialLR(
            optimizer,
            [schedules.LambdaLR(optimizer, lambda e: 1.0), schedules.CosineAnnealingLR(optimizer, 5)],
            milestones=[2],
        ),
        cycle=schedules.OneCycleLR(optimizer, 0.1, total_steps=10),
        plateau=schedules.ReduceLROnPlateau(optimizer),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        average=torch.optim.swa_utils.AveragedModel(model),
        loader=DataLoader(TensorDataset(torch.ones(9, 2)), shuffle=True, batch_size=3),
        log=logging.getLogger("x"),
        lock=threading.Lock(),
        event=threading.Event(),
        back=weakref.ref(model),
        path=tmp_path,
        file=(tmp_path / "log").open("w"),
        device=torch.device("cpu"),
        kind=Helper,
        module=torch,
        pattern=__import__("re").compile("a"),
        names=[f"row {number}" for number in range(100_000)],
    )


def test_ordinary_attributes_keep_nobody_from_a_restart(tmp_path: Path) -> None:
    holder = ordinary(tmp_path)
    known = KnownAttributes({"holder": holder})
    assert known.changes({"holder": holder}).obstacles == []
    for (x,) in holder.loader:
        holder.model[2](*[holder.model[1](holder.model[0](x))[0]] * 3)[0].sum().backward()
        holder.schedule.optimizer.step()
        holder.average.update_parameters(holder.model)
        holder.cycle.step()
        holder.schedule.step()
        holder.plateau.step(1.0)
    holder.lock, holder.event = threading.Lock(), threading.Event()
    changes = known.changes({"holder": holder})
    assert changes.obstacles == []
    assert "holder.cycle.last_epoch" in changes.paths
    holder.file.close()


def test_a_tensor_that_was_replaced_is_not_kept_alive() -> None:
    holder = Holder(x=torch.ones(1), y=[torch.ones(1)])
    gone = [weakref.ref(holder.x), weakref.ref(holder.y[0])]
    known = KnownAttributes({"holder": holder})
    holder.x = holder.y[0] = torch.zeros(1)
    assert [one() for one in gone] == [None, None]
    assert set(known.changes({"holder": holder}).paths) == {"holder.x", "holder.y"}


def test_attributes_of_another_script_are_refused_and_nothing_changes(store: JobStore) -> None:
    changes = changed_since(Holder(x=Helper(), y=1), lambda h: (h.x.method(), set_(y=2)(h)))
    fresh = Holder(x=Slots(), y=1)
    with pytest.raises(RefusedSnapshotError, match=r"holder\.x is a Slots here, but a .*Helper was saved"):
        put_back(store, changes, fresh)
    assert fresh.y == 1
    with pytest.raises(RefusedSnapshotError, match=r"there is no holder\.x here"):
        put_back(store, changes, Holder(y=1))


def test_what_the_script_does_on_the_way_is_undone(store: JobStore) -> None:
    changes = changed_since(Holder(x=1, y=[1], z=Helper()), lambda h: set_(x=5)(h))
    fresh = Holder(x=1, y=[1], z=Helper())
    with open_snapshot(save(store, {ATTRIBUTES: changes}).path) as snapshot:
        known = KnownAttributes({"holder": fresh})
        restoration = check(snapshot, {ATTRIBUTES: known})
        fresh.y.append(2)
        fresh.new, fresh.z.count = 1, 9
        known.revert({"holder": fresh})
        restoration.apply()
    assert (fresh.x, fresh.y, fresh.z.count, hasattr(fresh, "new")) == (5, [1], 0, False)


def test_large_data_is_not_read_at_each_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuslice.checkpoint.attributes.marks.HASHED_BYTES", 1 << 20)
    holder = Holder(data=TensorDataset(torch.zeros(1 << 19)))
    known = KnownAttributes({"holder": holder})
    assert known.changes({"holder": holder}).paths == []
    holder.data.tensors[0][5] = 1
    assert known.changes({"holder": holder}).paths == ["holder.data.tensors[0]"]


def test_which_classes_are_the_scripts_own() -> None:
    found = [kinds.is_scripts_own(kind) for kind in (Holder, threading.local, deque, torch.optim.SGD)]
    assert found == [True, False, False, False]
