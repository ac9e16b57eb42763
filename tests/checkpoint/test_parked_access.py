"""Whoever touches a tensor of a suspended job is told so by our error, however torch is called."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

import gpuslice
from gpuslice.checkpoint import parked_access
from gpuslice.checkpoint.parked_access import ParkedAccess
from gpuslice.errors import TensorParkedError, UsageError
from gpuslice.kernels.storage_access import forbid, permit
from gpuslice.runtime.threads.thread_gate import ThreadGate


class Touched:
    """A model with an optimizer that has stepped, a view, and a graph that is still to be run backward."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(self.layer.parameters())
        self.layer(torch.ones(2, 8)).sum().backward()
        self.optimizer.step()
        self.weight = self.layer.weight
        self.view = self.weight.detach().view(-1)[3:]
        self.loss = (self.weight.tanh() * self.weight).sum()

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.layer.parameters(), *(p.grad for p in self.layer.parameters()), *kept, self.loss]
        return [tensor.untyped_storage() for tensor in tensors]


TOUCHES: dict[str, Callable[[Touched], object]] = {
    "sum": lambda t: t.weight.sum(),
    "operator": lambda t: 1 + t.weight,
    "item": lambda t: t.weight[0, 0].item(),
    "truth": lambda t: bool(t.weight[0, 0] > 0),
    "repr": lambda t: repr(t.weight),
    "format": lambda t: f"{t.view[0]:.3f}",
    "numpy": lambda t: t.weight.detach().numpy(),
    "asarray": lambda t: np.asarray(t.view),
    "tolist": lambda t: t.view.tolist(),
    "in place": lambda t: t.view.add_(1),
    "item assignment": lambda t: t.view.__setitem__(0, 1.0),
    "init": lambda t: torch.nn.init.zeros_(t.weight),
    "forward": lambda t: t.layer(torch.ones(1, 8)),
    "step": lambda t: t.optimizer.step(),
    "clip": lambda t: torch.nn.utils.clip_grad_norm_(t.layer.parameters(), 1.0),
    "backward": lambda t: t.loss.backward(),
    "autograd.backward": lambda t: torch.autograd.backward(t.loss, torch.ones(())),
    "autograd.grad": lambda t: torch.autograd.grad(t.loss, t.weight),
    "deepcopy": lambda t: copy.deepcopy(t.layer),
    "pickle": lambda t: pickle.dumps(t.view),
    "save": lambda t: torch.save(t.layer.state_dict(), io.BytesIO()),
    "collate": lambda t: default_collate([t.view, t.view]),
    "iterate": lambda t: [float(one) for one in t.view],
    "vector": lambda t: torch.nn.utils.parameters_to_vector(t.layer.parameters()),
}


@pytest.fixture
def access() -> Iterator[ParkedAccess]:
    access = ParkedAccess()
    access.begin()
    yield access
    access.end()


@pytest.mark.usefixtures("access")
@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_touching_is_said_to_be_that(touch: Callable[[Touched], object]) -> None:
    touched = Touched()
    forbid(touched.storages)
    with pytest.raises(gpuslice.TensorParkedError, match=r"job\.resume\(\)"):
        touch(touched)
    permit(touched.storages)
    touch(touched)


@pytest.mark.usefixtures("access")
def test_what_needs_no_memory_can_be_asked() -> None:
    touched = Touched()
    forbid(touched.storages)
    assert touched.weight.shape == (8, 8)
    assert touched.weight.requires_grad
    assert str(touched.weight.device) == "cpu"
    assert "Linear" in repr(touched.layer)
    assert torch.ones(3).sum() == 3
    permit(touched.storages)


def test_the_error_is_a_runtime_error_and_a_mistake_of_use() -> None:
    assert issubclass(TensorParkedError, RuntimeError)
    assert issubclass(TensorParkedError, UsageError)


def test_a_thread_that_passes_the_gate_is_told() -> None:
    gate, touched, said = ThreadGate(), Touched(), list[BaseException]()

    def body() -> None:
        with gate.mode():
            try:
                touched.weight.sum()
            except RuntimeError as error:
                said.append(error)

    gate.parked_access.begin()
    forbid(touched.storages)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    permit(touched.storages)
    gate.parked_access.end()
    assert isinstance(said[0], TensorParkedError)


def test_a_pool_s_thread_that_is_older_than_the_gate_is_told() -> None:
    touched, access = Touched(), ParkedAccess()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: None).result()
        access.begin()
        forbid(touched.storages)
        with pytest.raises(TensorParkedError):
            pool.submit(touched.weight.sum).result()
        permit(touched.storages)
        access.end()
        assert pool.submit(touched.weight.sum).result() == touched.weight.sum()


def test_other_errors_are_torch_s_own(access: ParkedAccess) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not isinstance(caught.value, TensorParkedError)
    access.end()
    touched = Touched()
    forbid(touched.storages)
    with pytest.raises(RuntimeError) as caught:
        touched.weight.sum()
    assert not isinstance(caught.value, TensorParkedError)
    permit(touched.storages)


class Other(TorchFunctionMode):
    """A mode of the script's own: it may be entered before the suspend, and left before the resume."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("default", [False, True])
def test_modes_of_the_script_may_be_left_and_entered_meanwhile(default: bool) -> None:
    """The default device is the lowest of all, and each other mode takes the top one away at its end."""
    before, access, touched = torch._C._len_torch_function_stack(), ParkedAccess(), Touched()
    try:
        torch.set_default_device("cpu" if default else None)
        with torch.device("cpu"), Other():
            access.begin()
        with Other(), torch.device("meta"):
            assert torch.ones(2).device.type == "meta"
        forbid(touched.storages)
        with pytest.raises(TensorParkedError):
            touched.weight.sum()
        permit(touched.storages)
        torch.set_default_device("meta" if default else None)
        access.end()
    finally:
        torch.set_default_device(None)
    assert torch._C._len_torch_function_stack() == before


def test_afterwards_torch_is_as_it_was() -> None:
    entrances = [(torch.serialization, "_save"), (torch.autograd, "_engine_run_backward")]
    entrances += [(torch.cuda.CUDAGraph, "replay")]
    before = [vars(owner)[name] for owner, name in entrances]
    access = ParkedAccess()
    access.begin()
    access.begin()  # a second time changes nothing
    assert all(
        vars(owner)[name] is not original for (owner, name), original in zip(entrances, before, strict=True)
    )
    with pytest.raises(TensorParkedError):
        torch.cuda.CUDAGraph.replay(object())  # type: ignore[arg-type]
    access.end()
    access.end()
    assert [vars(owner)[name] for owner, name in entrances] == before


def test_an_entrance_that_another_torch_lacks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (("torch.serialization", "_none"), ("torch.none", "x"), ("torch.autograd", "Function.none"))
    monkeypatch.setattr(parked_access, "_ENTRANCES", names)
    access = ParkedAccess()
    access.begin()
    access.end()
