"""A restarted DDP adds gradients up in the buckets of the one before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from gpuslice.checkpoint.format.nodes import ModuleNode
from gpuslice.checkpoint.named import gradient_buckets
from gpuslice.checkpoint.named.describe import Describer


@pytest.fixture(autouse=True, scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting = f"file://{tmp_path_factory.mktemp('group') / 'meeting'}"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def replicated(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), **options)


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).square().mean().backward()


def order(model: DistributedDataParallel) -> list[list[int]]:
    """The order of parameters in which the buckets of ``model`` really lie."""
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    buckets = model.reducer._get_zeros_like_grad_buckets()
    return [[numbers[id(parameter)] for parameter in bucket.parameters()] for bucket in buckets]


def described(model: nn.Module) -> ModuleNode:
    node = Describer().node(model, "model")
    assert isinstance(node, ModuleNode)
    return node


def test_buckets_are_recorded_from_when_ddp_has_made_them_anew() -> None:
    model = replicated()
    for recorded in ({}, {}, {"": [[3, 2, 1, 0]]}, {"": [[3, 2, 1, 0]]}):
        assert described(model).buckets == recorded
        step(model)
    assert described(nn.ModuleDict({"part": model})).buckets == {"part": [[3, 2, 1, 0]]}


def test_buckets_are_known_however_late_they_were_made() -> None:
    model = replicated()
    with model.no_sync():
        for _ in range(12):  # DDP notes what it does in its first ten iterations, and then in every 100th
            step(model)
    step(model)
    step(model)
    assert described(model).buckets == {"": [[3, 2, 1, 0]]}


@pytest.mark.parametrize("views", [False, True])
def test_a_new_ddp_gets_the_buckets_and_the_same_gradients(views: bool) -> None:
    model, other = replicated(), replicated(gradient_as_bucket_view=views)
    step(model)
    first = order(other)
    wanted = [[2, 0], [3, 1]]
    assert first != wanted
    gradient_buckets.lay_out(other, wanted)
    assert order(other) == wanted
    step(other)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one.grad, two.grad) for one, two in pairs)  # type: ignore[arg-type]
    step(other)  # it makes its buckets by the order of its gradients now
    assert gradient_buckets.layout(other) == order(other) == [[3, 2, 1, 0]]


@pytest.mark.parametrize("buckets", [[[3, 2, 1]], [[3, 2, 1, 0, 4]], [[3, 2, 1, 1]], [[3, 2, 1, 0], []]])
def test_what_is_no_layout_of_its_parameters_changes_nothing(buckets: list[list[int]]) -> None:
    model = replicated()
    before = order(model)
    gradient_buckets.lay_out(model, buckets)
    assert order(model) == before
