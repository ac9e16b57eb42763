"""Tensors of classes of their own: suspended bit for bit, restored by their class, or named as unsaved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.named.state import check, describe
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import RefusedSnapshotError
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName


class Codes(torch.Tensor):
    """8-bit values with a scale, as optimizers keep them; a context that says how."""

    codes: torch.Tensor
    scale: torch.Tensor
    signed: bool

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> Codes:
        made: Codes = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "scale"], {"signed": self.signed}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: torch.Size, stride: Any) -> Codes:
        return cls(inner["codes"], inner["scale"], context["signed"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].signed)
        raise NotImplementedError(func)


class Opaque(Codes):
    """Its context is an object."""

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "scale"], object()


class Derived(TwoTensor):
    """Inherits what makes the base class."""


class Hidden(torch.Tensor):
    """Keeps its memory in an attribute and says so to nobody."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Hidden:
        made: Hidden = torch.Tensor._make_wrapper_subclass(cls, inner.shape)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class Methods(torch.Tensor):
    """Only adds a method."""

    def doubled(self) -> torch.Tensor:
        return self + self


class Weight(torch.nn.Parameter):
    """A parameter with a name of its own."""


def codes(seed: int, kind: type[Codes] = Codes) -> Codes:
    generator = torch.Generator().manual_seed(seed)
    return kind(torch.randint(-128, 127, (6, 4), generator=generator, dtype=torch.int8), torch.rand(()), True)


def parts(value: Any) -> list[Any]:
    """The classes and the bytes of everything that a tensor is made of."""
    if hasattr(type(value), "__tensor_flatten__"):
        return [type(value), *(parts(getattr(value, name)) for name in value.__tensor_flatten__()[0])]
    return [type(value), value.detach().as_subclass(torch.Tensor).tolist(), value.requires_grad]


MADE: dict[str, Callable[[int], torch.Tensor]] = {
    "two parts": codes,
    "nested": lambda seed: TwoTensor(
        TwoTensor(torch.full((3,), 1.0 + seed), torch.full((3,), 2.0 + seed)),
        TwoTensor(torch.full((3,), 3.0 + seed), torch.full((3,), 4.0 + seed)),
    ),
    "methods": lambda seed: torch.full((5,), 1.0 + seed).as_subclass(Methods),
    "parameter": lambda seed: Weight(torch.full((5,), 1.0 + seed)),
}
UNSAVED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "context": (lambda: codes(1, Opaque), "more than tensors and plain values"),
    "hidden": (lambda: Hidden(torch.ones(5)), "has no __tensor_flatten__"),
    "within": (lambda: TwoTensor(codes(1, Opaque), codes(1, Opaque)), "more than tensors and plain values"),
    "made otherwise": (lambda: Derived(torch.ones(3), torch.ones(3)), "does not make again"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "a nested tensor",
    ),
    "strided nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
}


def suspended(store: JobStore, named: dict[str, object]) -> SnapshotFile:
    """Suspend and resume; returns the snapshot."""
    switch = Switch(open_device(DeviceName("cpu", None)), store)
    switch.suspend(boundary=1, named=named, restartable=True)
    switch.resume()
    assert switch.snapshot is not None
    return switch.snapshot


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_tensor_of_its_own_class_comes_back(store: JobStore, make: Callable[[int], torch.Tensor]) -> None:
    saved, state = make(1), {"momentum": make(2)}
    expected = parts(saved), parts(state["momentum"])
    snapshot = suspended(store, {"saved": saved, "state": state})
    assert snapshot.restartable
    assert (parts(saved), parts(state["momentum"])) == expected
    live, there, empty = make(3), {"momentum": make(4)}, dict[str, Any]()
    known = there["momentum"]
    check(snapshot, {"saved": live, "state": there}).apply()
    assert (parts(live), parts(there["momentum"])) == expected
    assert there["momentum"] is known
    check(snapshot, {"state": empty}).apply()
    assert parts(empty["momentum"]) == expected[1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("make", "reason"), UNSAVED.values(), ids=UNSAVED)
def test_what_cannot_be_taken_apart_is_suspended_and_said_to_be_unsaved(
    store: JobStore, make: Callable[[], torch.Tensor], reason: str
) -> None:
    held = {"momentum": make(), "count": 3}
    (unsaved,) = describe({"state": held}).unsaved
    assert unsaved.startswith("state['momentum']")
    assert reason in unsaved
    snapshot = suspended(store, {"state": held, "other": torch.ones(3)})
    assert not snapshot.restartable
    with pytest.raises(RefusedSnapshotError, match=reason):
        check(snapshot, {"state": {}})
    check(snapshot, {"other": torch.zeros(3)})


def test_an_attribute_that_nothing_saves_is_named(store: JobStore) -> None:
    tensor: Any = torch.ones(5).as_subclass(Methods)
    tensor.scale = 3
    (unsaved,) = describe({"state": tensor}).unsaved
    assert "attribute 'scale'" in unsaved


def test_a_tensor_that_is_there_must_fit(store: JobStore) -> None:
    snapshot = suspended(store, {"saved": codes(1)})
    for other in (
        Codes(torch.ones(2, dtype=torch.int8), torch.ones(()), True),
        codes(1, Opaque),
        torch.ones(6, 4),
    ):
        before = parts(other)
        with pytest.raises(RefusedSnapshotError, match="saved"):
            check(snapshot, {"saved": other})
        assert parts(other) == before
    unsigned = codes(1)
    unsigned.signed = False
    with pytest.raises(RefusedSnapshotError, match="another layout"):
        check(snapshot, {"saved": unsigned})


def test_a_class_that_is_not_there_is_named(store: JobStore, tmp_path: Path) -> None:
    class Local(Codes):
        """Like any other, but defined where no import finds it."""

    snapshot = suspended(store, {"state": {"a": codes(1, Local)}})
    empty: dict[str, Any] = {}
    check(snapshot, {"state": empty}).apply()
    assert type(empty["a"]) is Local
    Local.__qualname__ = "Another"
    with pytest.raises(RefusedSnapshotError, match="none has that name"):
        check(snapshot, {"state": {}})


def test_a_class_that_makes_something_else_is_refused(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = suspended(store, {"state": {"a": codes(1)}})

    def broken(inner: Any, context: Any, size: Any, stride: Any) -> Codes:
        raise KeyError("layout")

    monkeypatch.setattr(Codes, "__tensor_unflatten__", broken)
    with pytest.raises(RefusedSnapshotError, match="cannot be made: KeyError"):
        check(snapshot, {"state": {}})
    monkeypatch.setattr(Codes, "__tensor_unflatten__", lambda *_: torch.ones(6, 4))
    with pytest.raises(RefusedSnapshotError, match="something else"):
        check(snapshot, {"state": {}})
