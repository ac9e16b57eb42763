"""A rank of a linear regression whose parameters are divided among ranks that come and go (``training.py``).

Words: as there; ``whole`` divides nothing; ``adam`` trains with AdamW and a scheduler.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset
from training import (
    BATCH,
    EPOCHS,
    FEATURES,
    LENGTH,
    MICRO_BATCH,
    RATE,
    data,
    digest,
)

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
    path, ranks, schedule, *words = sys.argv[1:]
    pairs = (pair.split(":") for pair in schedule.split(",") if pair)
    resizes = {int(step): int(width) for step, width in pairs}
    rank = int(os.environ.get("RANK", "0"))
    dataset = TensorDataset(torch.arange(LENGTH), *data())
    sampler = elastic.ElasticSampler(dataset, BATCH, MICRO_BATCH, seed=5)
    history: list[int] = []
    begin = int(ranks) or None
    world = elastic.attach(history=history, sampler=sampler, ranks=begin, build=lambda: make(words))
    built = world.built
    wanted = next((word.removeprefix("until") for word in words if word.startswith("until")), "")
    with open(f"{path}.{rank}", "a") as log:
        for _ in world.epochs(100 if wanted else int(os.environ.get("EPOCHS", str(EPOCHS)))):
            for batch in world.batches(dataset):
                if history[-1:] != [world.width]:
                    history.append(world.width)
                time.sleep(0.05 if wanted else 0.0)
                built = world.built
                model, optimizer = built["model"], built["optimizer"]
                step = sampler.epoch * -(-LENGTH // BATCH) + sampler.position // BATCH
                before = digest(*state_of(built))
                seen: list[int] = []
                weight, bias = (whole(one).tolist() for one in model.parameters())
                for indices, inputs, targets in batch:
                    seen += [] if batch.repeated else indices.tolist()
                    batch.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                if "schedule" in built and sampler.position == 0:
                    built["schedule"].step()
                line = {
                    "step": step,
                    "epoch": world.epoch,
                    "width": world.width,
                    "number": world.number,
                    "state": before,
                    "after": digest(*state_of(built)),
                    "seen": seen,
                    "own": sum(
                        one.to_local().numel() if isinstance(one, DTensor) else one.numel()
                        for one in model.parameters()
                    ),
                    "loss": batch.loss,
                    "samples": batch.samples,
                    "weight": weight,
                    "bias": bias[0],
                }
                print(json.dumps(line), file=log, flush=True)
                if f"stop-at-{step}" in words:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step in resizes:
                    world.resize(resizes[step])
            if wanted and wanted in "".join(f"-{width}" for width in history):
                break
        print(json.dumps({"end": digest(*state_of(built))}), file=log, flush=True)


if __name__ == "__main__":
    main()
