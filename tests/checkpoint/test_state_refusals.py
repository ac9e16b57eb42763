"""Named state that does not fit, is damaged or cannot be saved is refused by name, and nothing changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from gpuslice.checkpoint.format import nodes
from gpuslice.checkpoint.format.layout import Layout
from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.named.state import check, describe
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError, UsageError

from .named_state import Net, module_bits, reload, save


def refusals() -> dict[str, tuple[Callable[[], dict[str, object]], Callable[[], dict[str, object]], str]]:
    """What was saved, what is here, and the entry that the message must name."""
    one = lambda *shape: {"m": nn.Linear(*shape)}  # noqa: E731

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
    one = ["value", 1]
    unequal = ["dict", ["tuple", "a", "a"], [one, one]]
    listed, nested = ["dict", ["list", "a"], [one]], ["dict", ["tuple", ["list", 1]], [one]]
    state = {"0": ["dict", ["tuple", "a"], [one]], "3": one}
    beyond = ["optimizer", [], [[[2]]], state, {}, {"0": "cpu"}]
    missing = ["tensor", 5, "cpu", False, None]
    for node in (
        *(unequal, listed, nested, beyond, missing),
        *([], [1], 1, "m", one, ["list", [one], 1], ["tensor"], ["evil", 1], [["value"], 1]),
        *(["tensor", -1, "cpu", False, None], ["tensor", 2**70, "cpu", False, None]),
        *(["tensor", 0, "cpu"], ["module", {}, {"": 1}, {}], ["value", ["evil"]], ["value", {}]),
    ):
        _refuse(store, json.dumps({"m": node}, separators=(",", ":")).encode())
    for tree in (b"null", b"[1]", b"{", b'{"m":["value",1],"m":["value",1]}', b'{"m": ["value",1]}', b"\xff"):
        _refuse(store, tree)


@pytest.mark.parametrize("held", [lambda tensor: tensor, lambda tensor: {"a": tensor}])
def test_integers_that_need_a_gradient_are_refused(store: JobStore, held: Callable[[object], object]) -> None:
    snapshot = save(store, {"m": held(torch.zeros(2, dtype=torch.int64))})
    snapshot.tree = snapshot.tree.replace(b'"cpu",false', b'"cpu",true')
    with pytest.raises(RefusedSnapshotError, match="was saved as int64 that requires a gradient"):
        check(snapshot, {"m": held(torch.zeros(2, dtype=torch.int64))})


def _forge(tree: bytes, path: tuple[str | int, ...], value: object) -> bytes:
    """A tree with something else at the place to which these keys lead."""
    described = json.loads(tree)
    *way, last = path
    holder = described
    for key in way:
        holder = holder[key]
    holder[last] = value
    return json.dumps(described, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("m", 5), True, "was saved as int64 that requires a gradient"),
        (("m", 3, 1, 2), "nowhere", r"m\[1\] was on 'nowhere'"),
        (("m", 3, 1, 3), True, r"m\[1\] was saved as int64 that requires a gradient"),
        (("m", 3), [], "has no parts"),
        (("m", 2), [2**64], "is no tensor"),
    ],
    ids=["gradient", "device", "gradient of a part", "no parts", "size"],
)
@pytest.mark.parametrize(
    "held", [lambda tensor: tensor, lambda tensor: {"a": tensor}], ids=["named", "loose"]
)
def test_forged_parts_of_sparse_tensors_are_refused(
    store: JobStore, held: Callable[[object], object], path: tuple[str | int, ...], value: object, words: str
) -> None:
    tensor = torch.ones(3, dtype=torch.int64).to_sparse()
    snapshot = save(store, {"m": held(tensor)})
    inside = ("m", 2, 0, *path[1:]) if isinstance(held(tensor), dict) else path
    snapshot.tree = _forge(snapshot.tree, inside, value)
    with pytest.raises(RefusedSnapshotError, match=words.replace(r"m\[", r"m.*\[")):
        check(snapshot, {"m": held(torch.zeros(3, dtype=torch.int64).to_sparse())})


def test_an_optimizer_s_device_must_be_one(store: JobStore) -> None:
    model = nn.Linear(2, 2)
    named = {"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}
    snapshot = save(store, named)
    snapshot.tree = _forge(snapshot.tree, ("o", 5, "1"), "nowhere")
    with pytest.raises(RefusedSnapshotError, match="o was on 'nowhere', no device"):
        check(snapshot, named)


@pytest.mark.parametrize("held", [lambda tensor: tensor, lambda tensor: [tensor]], ids=["named", "loose"])
def test_a_dtype_of_a_newer_torch_is_refused(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, held: Callable[[object], object]
) -> None:
    snapshot = save(store, {"m": held(torch.zeros(2, dtype=torch.uint7))})
    monkeypatch.delattr(torch, "uint7")
    with pytest.raises(RefusedSnapshotError, match="is uint7, which this torch does not know"):
        check(snapshot, {"m": held(torch.zeros(2))})


@pytest.mark.parametrize(
    "forged",
    [
        lambda: torch.zeros(3),
        lambda: torch.zeros(2, dtype=torch.float64),
        lambda: torch.zeros(3).to_sparse(),
    ],
    ids=["shape", "dtype", "sparse"],
)
def test_a_gradient_that_a_tensor_cannot_have_is_refused(
    store: JobStore, forged: Callable[[], torch.Tensor]
) -> None:
    # Made here: a tensor that is there from the collection on is parked with whatever another test suspends.
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    first.grad = torch.zeros(2)
    gradient = forged()
    described = json.loads(describe({"a": first, "g": gradient}).tree)
    described["a"][4] = described.pop("g")
    saved = save(store, {"a": first, "g": gradient})
    saved.tree = json.dumps(described, separators=(",", ":")).encode()
    with pytest.raises(RefusedSnapshotError, match="a was saved with a gradient of float"):
        check(saved, {"a": second})
    assert second.grad is None


def _refuse(store: JobStore, tree: bytes) -> None:
    snapshot = store.begin(Layout(())).publish(tree, [], boundary=1, restartable=True)
    with pytest.raises((RefusedSnapshotError, CorruptSnapshotError)):
        check(snapshot, {"m": torch.ones(1)})


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list and object of JSON with each of its keys."""
    if isinstance(value, (list, dict)):
        for key in range(len(value)) if isinstance(value, list) else list(value):
            yield value, key
            yield from _parts(value[key])


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.integers()
    | st.sampled_from(["", "cpu", "tensor", "dict"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["0", "step", "m"]), inner),
    max_leaves=4,
)


@pytest.fixture
def trained(store: JobStore) -> tuple[dict[str, object], SnapshotFile]:
    model = Net(1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    named = {"m": model, "o": optimizer, "d": {"a": [torch.ones(2), 1.5], ("b", 2): None}}
    named |= {"g": [torch.Generator(), np.random.Generator(np.random.MT19937(1))]}
    return named, save(store, named)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_forged_named_state_is_refused_or_fits_and_nothing_changes(
    trained: tuple[dict[str, object], SnapshotFile], data: st.DataObject
) -> None:
    """One entry of the tree is something else, with the right checksums."""
    named, snapshot = trained
    model = cast(nn.Module, named["m"])
    whole, before = json.loads(describe(named).tree), module_bits(model)
    places = list(_parts(whole))
    holder, key = data.draw(st.sampled_from(places), label="where")
    other, there = data.draw(st.sampled_from(places), label="from")
    holder[key] = data.draw(_JSON | st.just(copy.deepcopy(other[there])), label="what")
    snapshot.tree = json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()
    with suppress(RefusedSnapshotError, CorruptSnapshotError):
        check(snapshot, named)
    assert module_bits(model) == before


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bytes_of_named_state_have_one_form(store: JobStore, data: st.DataObject) -> None:
    tree = describe({"m": Net(1), "d": {"a": [torch.ones(2), 1.5], "b": None}}).tree
    at = data.draw(st.integers(0, len(tree) - 1), label="at")
    junk = data.draw(st.binary(max_size=3) | st.sampled_from([b" ", b"0", b'"', b",", b"]"]), label="junk")
    changed = tree[:at] + junk + tree[at + data.draw(st.integers(0, 2), label="skipped") :]
    with suppress(RefusedSnapshotError, CorruptSnapshotError):
        assert nodes.encode(nodes.decode(changed)) == changed


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
