"""The sweep finds every live storage once, wherever Python keeps it, and leaves no trace."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

from gpuslice.checkpoint.discover.live_instances import live_instances
from gpuslice.checkpoint.discover.storages import sweep
from gpuslice.checkpoint.discover.tensor_parts import strided_parts
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.types import DeviceName

DEVICE = CpuDevice(DeviceName("cpu", None))


class Found(NamedTuple):
    storage: torch.UntypedStorage
    nbytes: int
    label: str
    fixed: bool


def entry(storage: torch.UntypedStorage) -> Found:
    """The one entry for a storage."""
    (found,) = [one for one in sweep(DEVICE) if one.key == storage._cdata]
    return Found(found.storage, found.nbytes, found.label, found.fixed)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


class Buffered(torch.Tensor):
    """A plain subclass."""


def _sparse(layout: torch.layout) -> torch.Tensor:
    dense = torch.eye(8)
    if layout in (torch.sparse_bsr, torch.sparse_bsc):
        return dense.to_sparse(layout=layout, blocksize=(2, 2))
    return dense.to_sparse(layout=layout)


KINDS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.ones(5),
    "parameter": lambda: torch.nn.Parameter(torch.ones(5)),
    "subclass": lambda: torch.ones(5).as_subclass(Buffered),
    "view": lambda: torch.ones(10)[3:],
    "expanded": lambda: torch.ones(1).expand(1000),
    "complex": lambda: torch.ones(5, dtype=torch.complex64).conj(),
    "fp8": lambda: torch.ones(5).to(torch.float8_e4m3fn),
    "inference": lambda: _in_inference_mode(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(5), 0.1, 0, torch.qint8),
    "per channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 2), torch.ones(2), torch.zeros(2, dtype=torch.long), 0, torch.qint8
    ),
    "coo": lambda: _sparse(torch.sparse_coo),
    "csr": lambda: _sparse(torch.sparse_csr),
    "csc": lambda: _sparse(torch.sparse_csc),
    "bsr": lambda: _sparse(torch.sparse_bsr),
    "bsc": lambda: _sparse(torch.sparse_bsc),
    "two in one": lambda: TwoTensor(torch.ones(5), torch.zeros(5)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "from numpy": lambda: torch.from_numpy(np.ones(5)),
}
PARTS = {"per channel": 3, "coo": 2, "csr": 3, "csc": 3, "bsr": 3, "bsc": 3, "two in one": 2}


def _in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(5)


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested tensors|quantize).*")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_is_found(kind: str) -> None:
    tensor = KINDS[kind]()
    parts = [part for part in strided_parts(tensor) if part.numel()]
    assert len(parts) >= PARTS.get(kind, 1)
    for part in parts:
        assert entry(storage_of(part)).nbytes == storage_of(part).nbytes()


def test_bare_storages_are_found() -> None:
    untyped = torch.UntypedStorage(100)
    assert entry(untyped).label == "a bare storage"
    typed = torch.storage.TypedStorage(10, dtype=torch.float32, _internal=True)
    assert entry(typed._untyped_storage).nbytes == 40


def test_a_gradient_that_nobody_looked_at_is_found() -> None:
    parameter = torch.nn.Parameter(torch.ones(1234))
    parameter.sum().backward()
    labels = [one.label for one in sweep(DEVICE)]
    assert labels.count("float32 [1234]") == 2


def test_the_gradient_of_an_inner_tensor_is_found_without_a_warning() -> None:
    leaf = torch.ones(1235, requires_grad=True)
    kept, other = leaf * 2, leaf * 3
    kept.retain_grad()
    (kept + other).sum().backward()
    labels = [one.label for one in sweep(DEVICE)]
    assert labels.count("float32 [1235]") == 5  # leaf, its gradient, kept, its gradient, other


def test_views_and_ties_are_one_storage() -> None:
    base = torch.arange(4320)
    several = [base, base[1:], base[::2], base.view(3, -1), base.detach()]
    labels = [one.label for one in sweep(DEVICE) if one.nbytes == 4320 * 8]
    assert len(labels) == 1
    del several


def places() -> Iterator[tuple[str, Callable[[torch.Tensor], Any]]]:
    def in_closure(tensor: torch.Tensor) -> Any:
        return lambda: tensor

    def in_generator(tensor: torch.Tensor) -> Any:
        def wait() -> Iterator[int]:
            local = tensor
            yield 1
            assert local is not None

        generator = wait()
        next(generator)
        return generator

    yield "closure", in_closure
    yield "local variable", in_generator
    yield "list", lambda tensor: [tensor]
    yield "tuple", lambda tensor: (tensor,)
    yield "dict", lambda tensor: {"x": {"y": tensor}}
    yield "attribute", lambda tensor: type("Thing", (), {"held": tensor})
    yield "module", lambda tensor: torch.nn.ParameterList([tensor])


@pytest.mark.parametrize(("name", "keep"), list(places()), ids=[name for name, _ in places()])
def test_every_place_is_seen(name: str, keep: Callable[[torch.Tensor], Any]) -> None:
    holder = keep(torch.ones(777))
    assert "float32 [777]" in {one.label for one in sweep(DEVICE)}
    del holder
    gc.collect()
    assert "float32 [777]" not in {one.label for one in sweep(DEVICE)}


def test_objects_hidden_by_a_freeze_are_found() -> None:
    tensor = torch.ones(778)
    gc.freeze()
    assert gc.get_freeze_count() > 0
    assert entry(storage_of(tensor)).nbytes == tensor.nbytes


def test_tensors_without_memory_are_left_out() -> None:
    with FakeTensorMode():
        fake = torch.ones(999)
    meta, empty = torch.ones(999, device="meta"), torch.empty(0, 999)
    labels = {one.label for one in sweep(DEVICE)}
    assert not labels & {"float32 [999]", "float32 [0, 999]"}
    del fake, meta, empty


def test_lazy_modules_do_not_disturb() -> None:
    lazy = torch.nn.LazyLinear(3)
    sweep(DEVICE)
    assert isinstance(lazy.weight, torch.nn.UninitializedParameter)


class Liar:
    """An object that breaks when asked for its class."""

    @property
    def __class__(self) -> Any:
        raise AssertionError("asked")


def test_objects_are_not_asked_for_their_class() -> None:
    liar = Liar()
    sweep(DEVICE)
    del liar


def test_a_sweep_keeps_nothing_alive() -> None:
    tensor = torch.ones(100)
    reference = weakref.ref(tensor)
    sweep(DEVICE)
    del tensor
    assert reference() is None


def test_a_sweep_keeps_numpy_and_version_counters_as_they_are() -> None:
    tensor = torch.ones(100)
    sweep(DEVICE)
    assert storage_of(tensor).resizable()
    assert tensor._version == 0


class TestFixed:
    """Who may know an address."""

    def test_a_plain_tensor_is_free_to_move(self) -> None:
        tensor = torch.ones(100)
        assert not entry(storage_of(tensor)).fixed

    def test_a_parameter_with_gradient_and_optimizer_state_is_free_to_move(self) -> None:
        layer = torch.nn.Linear(30, 30)
        optimizer = torch.optim.Adam(layer.parameters())
        layer(torch.ones(30)).sum().backward()
        optimizer.step()
        assert layer.weight.grad is not None
        state = [value for state in optimizer.state.values() for value in state.values()]
        for tensor in (layer.weight, layer.weight.grad, *state):
            assert not entry(storage_of(tensor)).fixed

    def test_a_base_with_views_is_free_to_move(self) -> None:
        base = torch.ones(100)
        views = [base[1:], base[2:]]
        assert not entry(storage_of(base)).fixed
        del views

    def test_a_pending_graph_fixes_what_it_saved(self) -> None:
        weight = torch.ones(100, requires_grad=True)
        pending = (weight * weight).sum()
        assert entry(storage_of(weight)).fixed
        del pending

    @pytest.mark.parametrize("consumer", [np.from_dlpack, torch.from_dlpack])
    def test_memory_given_away_by_dlpack_is_fixed(self, consumer: Callable[[Any], Any]) -> None:
        tensor = torch.ones(100)
        taken = consumer(tensor)
        assert entry(storage_of(tensor)).fixed
        del taken

    def test_only_memory_that_is_not_torch_s_alone_is_exposed(self) -> None:
        """While the script goes on, NumPy and DLPack could read it; a dead graph's nodes do not."""
        shown, given, owned = torch.ones(5), torch.ones(5), torch.from_numpy(np.ones(5))
        arrays = [shown.numpy(), np.from_dlpack(given)]
        free, stepped, pending = (torch.ones(5, requires_grad=True) for _ in range(3))
        graphs = [(one * one).sum() for one in (stepped, pending)]
        graphs[0].backward()
        exposed = {one.key: one.exposed for one in sweep(DEVICE, alone=False)}
        tensors = [shown, given, owned, free, stepped, pending]
        assert [exposed[storage_of(one)._cdata] for one in tensors] == [True, True, True, False, False, True]
        assert not any(one.exposed for one in sweep(DEVICE))
        del arrays, graphs

    def test_storages_over_the_same_memory_are_fixed(self) -> None:
        array = np.ones(100)
        one, other = torch.from_numpy(array), torch.from_numpy(array[50:])
        assert entry(storage_of(one)).fixed
        assert entry(storage_of(other)).fixed


def test_a_storage_that_only_weak_references_remember_is_not_found() -> None:
    """Before torch 2.7 or so its Python object outlives it, in the collector's sight."""
    storage = torch.ones(100).untyped_storage()
    tensor = torch.empty(0).set_(storage)  # type: ignore[call-overload]
    remembered = StorageWeakRef(storage)
    del storage  # the tensor keeps it, and its Python object
    del tensor
    assert remembered.expired()
    for _ in range(2):
        (found,) = live_instances(torch.UntypedStorage)
        assert remembered.cdata not in {item._cdata for item in found}
        del found
    assert remembered.expired()
