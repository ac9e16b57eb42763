"""Coming back on another device: every tensor object stays itself and gets the new memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch import move
from gpuslice.checkpoint.switch.move import check_movable, move_storages
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import SuspendRefusedError

from ..harness import FaultyDevice, Job, SpyGate, digest, seed


@pytest.fixture(autouse=True)
def no_tensors_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A graph that waits for its backward pass holds up a move, whosever it is: other tests leave some."""
    found = move.live_instances
    (others,) = found(torch.Tensor)  # kept, so that their numbers stay theirs
    before = set(map(id, others))
    monkeypatch.setattr(
        move,
        "live_instances",
        lambda *kinds: [[one for one in ones if id(one) not in before] for ones in found(*kinds)],
    )
    yield
    del others


def moved(*tensors: torch.Tensor) -> tuple[list[torch.UntypedStorage], list[torch.UntypedStorage]]:
    """The tensors' storages, and copies of them elsewhere."""
    old = list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())
    return old, [storage.clone() for storage in old]


def test_views_parameters_and_gradients_follow() -> None:
    layer = torch.nn.Linear(4, 4)
    layer(torch.ones(4)).sum().backward()
    view = layer.weight.detach()[1:, ::2]
    assert layer.weight.grad is not None
    everything = [layer.weight, layer.weight.grad, view]
    before = [(id(tensor), tensor.tolist(), tensor.stride()) for tensor in everything]
    old, new = moved(*everything)
    move_storages(old, new)
    for storage in old:
        storage.fill_(0)
    assert [(id(tensor), tensor.tolist(), tensor.stride()) for tensor in everything] == before
    assert layer.weight.untyped_storage()._cdata == view.untyped_storage()._cdata == new[0]._cdata
    assert layer.weight.is_leaf
    assert layer.weight.requires_grad
    layer(torch.ones(4)).sum().backward()


def test_a_pending_graph_is_refused_and_nothing_moves() -> None:
    first, weight = torch.ones(3), torch.ones(5, requires_grad=True)
    pending = (weight * weight).sum()
    old, new = moved(first, weight)
    with pytest.raises(SuspendRefusedError, match=r"float32 \[5\].*pending autograd graph"):
        move_storages(old, new)
    assert first.untyped_storage()._cdata == old[0]._cdata
    pending.backward()


def test_sparse_tensors_are_refused() -> None:
    sparse = torch.eye(3).to_sparse()
    old, new = moved(sparse._indices())
    with pytest.raises(SuspendRefusedError, match="hides the memory"):
        move_storages(old, new)


def test_bare_storages_are_refused() -> None:
    storage = torch.UntypedStorage(10)
    with pytest.raises(SuspendRefusedError, match="bare storage"):
        move_storages([storage], [storage.clone()])


def test_another_slot_of_the_host_takes_over(store: JobStore, job: Job) -> None:
    before = job.digest()

    class OtherSlot(FaultyDevice):
        def pin(self) -> None:
            self.calls.append("pin")

    switch, other = Switch(FaultyDevice(), store), OtherSlot()
    switch.suspend(boundary=1)
    switch.resume(other)
    assert switch.device is other
    assert "pin" in other.calls
    assert job.digest() == before


class Only(FaultyDevice):
    """Owns the storages of these tensors alone; as torch sees it, another device than ``cpu``."""

    def __init__(self, tensors: list[torch.Tensor], *, other: bool = False) -> None:
        super().__init__()
        self._own = {tensor.untyped_storage()._cdata for tensor in tensors}
        self.torch_device = torch.device("cpu", 0) if other else self.torch_device

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._own


def state_of(job: Job) -> list[torch.Tensor]:
    """The tensors of model and optimizer, and the gradients."""
    parameters = list(job.model.parameters())
    moments = [value for state in job.optimizer.state.values() for value in state.values()]
    return [*parameters, *moments, *(p.grad for p in parameters if p.grad is not None)]


def test_the_state_comes_back_on_another_device(store: JobStore, job: Job) -> None:
    twin = Job()
    switch = Switch(Only(state_of(job)), store, gate=SpyGate())
    switch.suspend(boundary=1)
    storage = job.model[0].weight.untyped_storage()._cdata
    switch.resume(Only([], other=True))
    assert job.model[0].weight.untyped_storage()._cdata != storage
    rng_state = torch.get_rng_state()
    job.step()
    torch.set_rng_state(rng_state)
    twin.step()
    assert digest(job.model, job.optimizer) == digest(twin.model, twin.optimizer)


def test_what_cannot_move_can_still_come_back(store: JobStore, job: Job) -> None:
    twin = Job()
    losses = []
    for one in (job, twin):
        seed(5)
        losses.append(one.model(torch.ones(2, 100)).sum())  # a pending graph holds the weights
    switch = Switch(Only(state_of(job)), store, gate=SpyGate())
    switch.suspend(boundary=1)
    with pytest.raises(SuspendRefusedError, match="cannot move"):
        switch.resume(Only([], other=True))
    assert switch.suspended
    switch.resume()
    for loss in losses:
        loss.backward()
    assert digest(job.model, job.optimizer) == digest(twin.model, twin.optimizer)


def test_numpy_memory_cannot_move(store: JobStore, job: Job) -> None:
    before = job.array.copy()
    switch = Switch(Only([job.tensor]), store, gate=SpyGate())
    switch.suspend(boundary=1)
    with pytest.raises(SuspendRefusedError, match="belongs to another library"):
        switch.resume(Only([], other=True))
    switch.resume()
    assert np.array_equal(job.array, before)


def test_what_an_ordinary_loop_leaves_behind_moves() -> None:
    """The graph of the last batch is dead, but its root, and views whose base nobody else has, are there."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    output = model(torch.ones(3, 4))[:, 0]
    hidden = model[0](torch.ones(3, 4)).relu().view(-1)
    loss = output.square().mean() + hidden.mean()
    loss.backward()
    everything = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    everything += [output, hidden, loss]
    before = [tensor.tolist() for tensor in everything]
    old, new = moved(*everything)
    check_movable(old)
    move_storages(old, new)
    for storage in old:
        storage.fill_(0)
    assert [tensor.tolist() for tensor in everything] == before
    gradient = everything[4].clone()
    model(torch.ones(3, 4))[:, 0].square().mean().backward()
    assert not torch.equal(everything[4], gradient)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_graph_is_pending_while_its_activations_are_kept(checkpointed: bool) -> None:
    """The parameter itself is in no node's memory: its layer comes first, and its input needs no gradient."""
    layer = torch.nn.Linear(4, 4)

    def forward() -> torch.Tensor:
        return layer(torch.ones(2, 4)).exp().sum()

    loss = torch.utils.checkpoint.checkpoint(forward, use_reentrant=False) if checkpointed else forward()
    old, new = moved(*layer.parameters())
    with pytest.raises(SuspendRefusedError, match=r"Backward.* a backward pass that is to come"):
        move_storages(old, new)
    loss.backward()
    move_storages(old, new)


def test_a_node_with_the_script_s_own_hooks_is_not_lost() -> None:
    layer = torch.nn.Linear(4, 4)
    node = torch.autograd.graph.get_gradient_edge(layer.weight).node
    seen: list[object] = []
    node.register_hook(lambda *gradients: seen.append(gradients))
    old, _ = moved(*layer.parameters())
    with pytest.raises(SuspendRefusedError, match="holds the node that collects its gradient"):
        check_movable(old)
    layer(torch.ones(4)).sum().backward()
    assert len(seen) == 1
