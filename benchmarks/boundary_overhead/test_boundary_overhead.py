"""What a boundary costs a job that nobody suspends: nanoseconds per batch and per step, beside a real step.

Both sides in one run. The DataLoader side is the hook's own descriptor on an iterator that fetches nothing,
so that the hook is what is measured; the optimizer side is Adam's step with and without the global hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpuslice.boundaries import BoundaryCounter
from gpuslice.hooks import BeforeFetch, count_boundaries

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
def test_training_step(benchmark: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small training step, forward, backward and Adam; with the hooks of DataLoaders and optimizers."""
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    monkeypatch.setattr(iterator, "__next__", iterator.__next__)
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
