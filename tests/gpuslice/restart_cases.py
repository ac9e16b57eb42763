"""A script for test_restart.py: many small trainings whose state is attached together.

``first FILE``   runs half of each, suspends, keeps the snapshot as FILE, resumes, runs the other half.
``second FILE``  starts with other seeds, restores FILE, runs the other half; then does so again with the
                 captures broken on purpose.
Prints one JSON object: digest by case.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import swa_utils

import gpuslice
from gpuslice.checkpoint.named import process_rng
from gpuslice.checkpoint.named.generators import Generator, generator_state

HALF = 3


def rows() -> torch.Tensor:
    """A batch with noise from all three libraries."""
    return torch.randn(5, 4) + random.random() + float(np.random.rand())


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))


class Case:
    """Named objects and one training step over them."""

    def __init__(self, step: Callable[[], Any], **named: Any) -> None:
        self.step = step
        self.named = named


def simple(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Case:
    model = net()
    optimizer = make(list(model.parameters()))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        return loss

    def step() -> None:
        nonlocal batch
        batch = rows()
        optimizer.step(closure)

    batch = rows()
    return Case(step, model=model, optimizer=optimizer)


def sparse() -> Case:
    model = nn.Embedding(9, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randint(9, (4,))).square().sum().backward()
        optimizer.step()

    return Case(step, model=model, optimizer=optimizer)


def accumulation() -> Case:
    model, count = net(), {"n": 0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        model(rows()).square().mean().backward()
        count["n"] += 1
        if count["n"] % 2 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    return Case(step, model=model, optimizer=optimizer, count=count)


def gan() -> Case:
    maker, critic = net(), net()
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (maker, critic)]

    def step() -> None:
        for sign, optimizer in zip((1, -1), optimizers, strict=True):
            optimizer.zero_grad()
            (sign * critic(maker(rows()).expand(5, 4)).mean()).backward()
            optimizer.step()

    return Case(step, nets=[maker, critic], optimizers=optimizers)


def scaled() -> Case:
    """A GradScaler that meets an infinity now and then, a scheduler, frozen and tied weights."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def step() -> None:
        optimizer.zero_grad()
        factor = float("inf") if random.random() < 0.3 else 1.0
        scaler.scale(model(rows()).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    return Case(step, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)


def averaged() -> Case:
    model = net()
    optimizer = torch.optim.RMSprop(model.parameters())
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def step() -> None:
        optimizer.zero_grad()
        model(rows()).square().mean().backward()
        optimizer.step()
        ema.update_parameters(model)
        for name, parameter in model.named_parameters():
            shadow[name].lerp_(parameter.detach(), 0.1)

    return Case(step, model=model, optimizer=optimizer, ema=ema, shadow=shadow)


def recurrent() -> Case:
    model = nn.LSTM(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    memory = torch.zeros(1, 5, 3)
    state: dict[str, Any] = {"cell": None}

    def step() -> None:
        optimizer.zero_grad()
        cell = torch.zeros(1, 5, 3) if state["cell"] is None else state["cell"]
        out, (hidden, cell) = model(rows()[None], (memory, cell))
        out.square().mean().backward()
        optimizer.step()
        memory.copy_(hidden.detach())
        state["cell"] = cell.detach()

    return Case(step, model=model, optimizer=optimizer, memory=memory, state=state)


def generators() -> Case:
    theirs = [
        torch.Generator().manual_seed(random.randrange(99)),
        np.random.default_rng(random.randrange(99)),
    ]
    own, drawn = random.Random(random.random()), torch.zeros(3)

    def step() -> None:
        drawn.add_(torch.rand(3, generator=theirs[0])).add_(float(theirs[1].random()) + own.gauss(0, 1))

    return Case(step, theirs=theirs, own=own, drawn=drawn)


def cases() -> dict[str, Case]:
    return {
        "adamw": simple(lambda p: torch.optim.AdamW(p, foreach=True)),
        "fused": simple(lambda p: torch.optim.Adam(p, fused=True)),
        "lbfgs": simple(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")),
        "sparse": sparse(),
        "accumulation": accumulation(),
        "gan": gan(),
        "scaled": scaled(),
        "averaged": averaged(),
        "recurrent": recurrent(),
        "generators": generators(),
    }


def names(started: dict[str, Case]) -> dict[str, Any]:
    return {f"{case}_{name}": item for case in started for name, item in started[case].named.items()}


def run(started: dict[str, Case]) -> dict[str, str]:
    """Half of the steps; the digest is over everything that was attached."""
    for _ in range(HALF):
        for case in started.values():
            case.step()
    return {name: digest(case.named) for name, case in started.items()}


def digest(value: Any) -> str:
    found = hashlib.sha256()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            found.update(
                item.detach().to_dense().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(item, dict):
            stack += [part for pair in item.items() for part in pair]
        elif isinstance(item, (list, tuple)):
            stack += item
        elif isinstance(item, Generator):
            stack.append(generator_state(item))
        elif isinstance(item, nn.Module):
            tensors = [*item.parameters(), *item.buffers()]
            stack += [*tensors, *(tensor.grad for tensor in tensors)]
        elif hasattr(item, "state_dict"):
            stack.append(item.state_dict())
        else:
            found.update(repr(item).encode())
    return found.hexdigest()


def main(life: str, file: str) -> dict[str, Any]:
    seed = len(life)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    started = cases()
    if life == "first":
        job = gpuslice.attach(**names(started))
        run(started)
        with job.suspended() as snapshot:
            shutil.copyfile(snapshot.path, file)
        return {"whole": run(started)}
    gpuslice.restore(file, **names(started))
    whole = run(started)
    one_short = {name: item for name, item in names(started).items() if name != "scaled_optimizer"}
    gpuslice.restore(file, **one_short)
    without_optimizer = run(started)
    process_rng.restore = lambda states, gpus=None: None
    gpuslice.restore(file, **names(started))
    return {"whole": whole, "without optimizer": without_optimizer, "without random": run(started)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
