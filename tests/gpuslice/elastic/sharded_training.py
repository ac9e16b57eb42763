"""A rank of a linear regression whose parameters are divided among ranks that come and go (``training.py``).

Words: as there; ``whole`` divides nothing; ``adam`` trains with AdamW and a scheduler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset
from training import BATCH, FEATURES, LENGTH, MICRO_BATCH, RATE, Run, data, digest

from gpuslice import elastic


class Row(torch.nn.Module):
    """A linear map to one number whose weight can be divided; 8 weights on 3 ranks are 3, 3 and 2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(FEATURES))
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight + self.bias


def make(words: list[str]) -> dict[str, Any]:
    model = Row()
    if "whole" not in words:
        fully_shard(model)
    if "adam" not in words:
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), RATE)}
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def whole(value: torch.Tensor) -> torch.Tensor:
    """All of it, on all ranks; a collective."""
    found = value.full_tensor() if isinstance(value, DTensor) else value
    return found.detach().clone()


def state_of(built: dict[str, Any]) -> list[torch.Tensor]:
    """Parameters and what the optimizer knows of each, whole."""
    optimizer = built["optimizer"]
    known = [
        optimizer.state[parameter][name]
        for parameter in built["model"].parameters()
        for name in sorted(optimizer.state[parameter])
        if optimizer.state[parameter][name] is not None
    ]
    rates = torch.tensor([group["lr"] for group in optimizer.param_groups], dtype=torch.float64)
    return [*map(whole, built["model"].parameters()), *map(whole, known), rates]


def main() -> None:
    run = Run()
    dataset = TensorDataset(torch.arange(LENGTH), *data())
    sampler = elastic.ElasticSampler(dataset, BATCH, MICRO_BATCH, seed=5)
    world = elastic.attach(
        history=run.history, sampler=sampler, ranks=run.begin, build=lambda: make(run.words)
    )

    def one(batch: Any) -> dict[str, Any]:
        built = world.built
        model, optimizer = built["model"], built["optimizer"]
        before = digest(*state_of(built))
        weight, bias = (whole(parameter).tolist() for parameter in model.parameters())
        seen: list[int] = []
        for indices, inputs, targets in batch:
            seen += [] if batch.repeated else indices.tolist()
            batch.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        if "schedule" in built and sampler.position == 0:
            built["schedule"].step()
        parts = (value.to_local() if isinstance(value, DTensor) else value for value in model.parameters())
        return {
            "state": before,
            "after": digest(*state_of(built)),
            "seen": seen,
            "own": sum(part.numel() for part in parts),
            "weight": weight,
            "bias": bias[0],
        }

    run.train(world, sampler, dataset, one, lambda: digest(*state_of(world.built)))


if __name__ == "__main__":
    main()
