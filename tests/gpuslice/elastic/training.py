"""A rank of a linear regression that grows and shrinks; writes down what it does to FILE.<rank>.

Words: the file; how many ranks begin; "STEP:WIDTH,..." when to resize; further words: ``scaled`` scales the
learning rate, ``momentum`` adds momentum, ``stop-at-N`` kills the process after step N, ``until-1-3-1`` goes
on until these widths were there and an epoch is over, a few steps a second; ``crowded`` makes steps as many
times as long as there are ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time

import torch
from torch.utils.data import TensorDataset

from gpuslice import elastic

LENGTH, FEATURES, BATCH, MICRO_BATCH, EPOCHS, RATE = 62, 8, 12, 3, 2, 0.1


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = 2 * torch.rand(LENGTH, FEATURES, generator=generator) - 1
    return inputs, inputs @ torch.linspace(-1, 1, FEATURES) + 0.1 * torch.randn(LENGTH, generator=generator)


def digest(*parts: object) -> str:
    """Of tensors and plain values, bit for bit."""
    seen = hashlib.sha256()
    for part in parts:
        seen.update(
            part.detach().numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode()
        )
    return seen.hexdigest()[:16]


def main() -> None:
    path, ranks, schedule, *words = sys.argv[1:]
    resizes = {
        int(step): int(width) for step, width in (pair.split(":") for pair in schedule.split(",") if pair)
    }
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(rank)  # what rank 0 begins with is what counts
    model = torch.nn.Linear(FEATURES, 1)
    momentum = 0.9 if "momentum" in words else 0.0
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=momentum)
    dataset = TensorDataset(torch.arange(LENGTH), *data())
    scaling = "learning_rate" if "scaled" in words else "accumulation"
    sampler = elastic.ElasticSampler(dataset, BATCH, MICRO_BATCH, seed=5, scaling=scaling)
    history: list[int] = []
    world = elastic.attach(
        history=history,
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        ranks=int(ranks) if int(ranks) else None,
    )
    log = open(f"{path}.{rank}", "a")  # noqa: SIM115
    wanted = next((word.removeprefix("until") for word in words if word.startswith("until")), "")
    for _ in world.epochs(100 if wanted else int(os.environ.get("EPOCHS", str(EPOCHS)))):
        for batch in world.batches(dataset):
            if history[-1:] != [world.width]:
                history.append(world.width)
            time.sleep((0.05 if wanted else 0.0) * (world.width if "crowded" in words else 1))
            step = sampler.epoch * -(-LENGTH // BATCH) + sampler.position // BATCH
            state = digest(*model.parameters(), *(sampler.epoch, sampler.position), *buffers(optimizer))
            seen = []
            for indices, inputs, targets in batch:
                seen += indices.tolist()
                batch.backward(torch.nn.functional.mse_loss(model(inputs).squeeze(1), targets))
            optimizer.step()
            optimizer.zero_grad()
            line = {
                "step": step,
                "epoch": world.epoch,
                "width": world.width,
                "number": world.number,
                "state": state,
                "seen": seen,
            }
            line |= {"loss": batch.loss, "samples": batch.samples, "rate": optimizer.param_groups[0]["lr"]}
            line |= {"weight": model.weight.tolist()[0], "bias": model.bias.tolist()[0]}
            print(json.dumps(line), file=log, flush=True)
            if f"stop-at-{step}" in words:
                os.kill(os.getpid(), signal.SIGKILL)
            if step in resizes:
                world.resize(resizes[step])
        if wanted and wanted in "".join(f"-{width}" for width in history):
            break
    print(json.dumps({"end": digest(*model.parameters(), *buffers(optimizer))}), file=log, flush=True)


def buffers(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The momentum of each parameter."""
    return [
        state["momentum_buffer"]
        for state in optimizer.state.values()
        if state.get("momentum_buffer") is not None
    ]


if __name__ == "__main__":
    main()
