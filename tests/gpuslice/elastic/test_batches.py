"""A batch that is not gone through as it must be is an error with a remedy; learning rates are put back."""

from __future__ import annotations

import pytest
import torch

from gpuslice import elastic
from gpuslice.elastic.batches import Batch, Feed, scale_rates
from gpuslice.elastic.sampler import ElasticSampler
from gpuslice.errors import UsageError

DATA = torch.arange(12.0).reshape(6, 2)


def batch(model: torch.nn.Module) -> Batch:
    sampler = ElasticSampler(DATA, 6, 2, shuffle=False)
    feed = Feed(sampler, DATA, 0, 1, {})  # type: ignore[arg-type]
    return Batch(next(feed.shares), feed.data, list(model.named_parameters()), torch.device("cpu"))


def test_micro_batches_together_have_the_gradient_of_the_whole() -> None:
    model = torch.nn.Linear(2, 1).double()
    whole = batch(model)
    for inputs in whole:
        whole.backward(model(inputs.double()).square().mean())
    ours, model.weight.grad = model.weight.grad, None
    loss = model(DATA.double()).square().mean()
    loss.backward()
    assert ours is not None
    torch.testing.assert_close(ours, model.weight.grad)
    assert whole.loss == pytest.approx(float(loss.detach()))


def test_a_micro_batch_needs_its_backward_pass() -> None:
    model = torch.nn.Linear(2, 1)
    first = batch(model)
    with pytest.raises(UsageError, match="without its backward pass"):
        for _ in first:
            pass
    second = batch(model)
    loss = model(next(iter(second))).mean()
    second.backward(loss)
    with pytest.raises(UsageError, match="without a micro-batch of its own"):
        second.backward(loss)


def test_gradients_must_be_cleared_between_batches() -> None:
    model = torch.nn.Linear(2, 1)
    for _ in range(1):
        first = batch(model)
        for inputs in first:
            first.backward(model(inputs).mean())
    with pytest.raises(UsageError, match="weight still has the gradient of the last batch"):
        next(iter(batch(model)))


def test_sparse_gradients_are_refused() -> None:
    model = torch.nn.Embedding(12, 3, sparse=True)
    whole = batch(model)
    parts = iter(whole)
    for _ in range(3):
        whole.backward(model(next(parts).long()).mean())
    with pytest.raises(UsageError, match="weight has a sparse gradient"):
        next(parts)


def test_steps_are_made_with_scaled_rates_and_nobody_else_sees_them() -> None:
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [one], "lr": 0.1 * (n + 1)} for n, one in enumerate(weights)])
    scale_rates([optimizer], lambda: 3.0)
    for one in weights:
        one.grad = torch.ones(3)
    optimizer.step()
    for number, one in enumerate(weights):
        torch.testing.assert_close(one.detach(), torch.full((3,), 1.0 - 0.3 * (number + 1)))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_what_cannot_grow_is_refused_by_name() -> None:
    model = torch.nn.Linear(2, 1)
    sampler = ElasticSampler(DATA, 6, 2)
    wrapped = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    with pytest.raises(UsageError, match="net is a DistributedDataParallel"):
        elastic.attach(net=wrapped, sampler=sampler)
    sharded = torch.nn.Linear(2, 1)
    sharded.weight.device_mesh = None  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="net has parameters that are divided among ranks"):
        elastic.attach(net=sharded, sampler=sampler)
    with pytest.raises(UsageError, match="0 of the attached objects are an ElasticSampler"):
        elastic.attach(model=model)
    with pytest.raises(UsageError, match="fn is a function"):
        elastic.attach(model=model, sampler=sampler, fn=batch)
