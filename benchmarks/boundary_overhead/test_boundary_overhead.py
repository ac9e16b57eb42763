"""What a boundary costs a job that nobody suspends: nanoseconds per batch and per step, beside a real step.

Both sides in one run. The DataLoader side is the hook's own descriptor on an iterator that fetches nothing,
so that the hook is what is measured; the optimizer side is Adam's step with and without the global hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpuslice.hooks.hooks import BeforeFetch, count_boundaries
from gpuslice.runtime.boundaries import BoundaryCounter

CALLS = 100_000


@pytest.mark.parametrize("kind", ["plain", "hooked"])
def test_fetch(benchmark: Any, kind: str) -> None:
    class Batches:
        def __iter__(self) -> Iterator[None]:
            return self

        def __next__(self) -> None:
            return None

    counter = BoundaryCounter()
    if kind == "hooked":
        Batches.__next__ = BeforeFetch(Batches.__next__, counter.fetching)  # type: ignore[method-assign]
    batches = Batches()

    def many() -> None:
        for _ in range(CALLS):
            next(batches)

    benchmark.pedantic(many, rounds=7, warmup_rounds=1)
    assert counter.count == (8 * CALLS if kind == "hooked" else 0)
    benchmark.extra_info["ns_per_batch"] = benchmark.stats.stats.median / CALLS * 1e9


@pytest.mark.parametrize("kind", ["plain", "hooked"])
def test_training_step(benchmark: Any, kind: str) -> None:
    """One small training step, forward, backward and Adam; with the hooks of DataLoaders and optimizers."""
    counter = BoundaryCounter()
    handle = count_boundaries(counter) if kind == "hooked" else None
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(32, 64), torch.randn(32, 1)

    def step() -> None:
        optimizer.zero_grad()
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()

    benchmark.pedantic(step, rounds=500, warmup_rounds=50)
    if handle is not None:
        handle.remove()
        assert counter.steps == 550
    benchmark.extra_info["ns_per_step"] = benchmark.stats.stats.median * 1e9


@pytest.mark.parametrize("kind", ["plain", "hooked"])
def test_backward(benchmark: Any, kind: str) -> None:
    """What follows a backward pass, in a loop without loader and optimizer: every pass is a boundary."""
    counter = BoundaryCounter()
    hooks = count_boundaries(counter)
    ended = vars(torch.autograd.graph)["_gpuslice_backward_ended"] if kind == "hooked" else lambda: None

    def many() -> None:
        for _ in range(CALLS):
            ended()

    benchmark.pedantic(many, rounds=7, warmup_rounds=1)
    hooks.remove()
    assert counter.count >= (7 * CALLS if kind == "hooked" else 0)
    benchmark.extra_info["ns_per_pass"] = benchmark.stats.stats.median / CALLS * 1e9


@pytest.mark.parametrize("kind", ["plain", "hooked"])
def test_call(benchmark: Any, kind: str) -> None:
    """One call of a model of three modules, in a script that only evaluates: every call is a boundary."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Identity())

        def forward(self, x: None) -> None:
            return self.layers(x)  # type: ignore[no-any-return]

    counter = BoundaryCounter()
    hooks = count_boundaries(counter) if kind == "hooked" else None
    model = Model().eval()

    def many() -> None:
        for _ in range(CALLS // 10):
            model(None)

    with torch.no_grad():
        benchmark.pedantic(many, rounds=7, warmup_rounds=1)
    if hooks is not None:
        hooks.remove()
        assert counter.count > 7 * CALLS // 10
    benchmark.extra_info["ns_per_call"] = benchmark.stats.stats.median / (CALLS // 10) * 1e9
