"""Training loops of scripts that are written for a GPU; each yields its state at every boundary."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from ..checkpoint.cases.registry import Loop

BOUNDARIES = 4
CASES: dict[str, Callable[[torch.device], Loop]] = {}


def case(make: Callable[[torch.device], Loop]) -> Callable[[torch.device], Loop]:
    CASES[make.__name__] = make
    return make


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8, 4),
    )


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))


@case
def pinned_loader(device: torch.device) -> Loop:
    """Batches come through page-locked memory without anybody waiting."""
    model = mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = TensorDataset(torch.randn(4 * BOUNDARIES, 16))
    for (batch,) in DataLoader(data, batch_size=4, shuffle=True, pin_memory=True):
        moved = batch.to(device, non_blocking=True)
        noisy = moved + 0.01 * torch.randn_like(moved)
        loss = model(noisy).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, model, optimizer


@case
def workers_of_the_loader(device: torch.device) -> Loop:
    model = mlp().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(4 * BOUNDARIES, 16))
    for (batch,) in DataLoader(data, batch_size=4, shuffle=True, num_workers=1, pin_memory=True):
        loss = model(batch.to(device, non_blocking=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, model, optimizer


@case
def mixed_precision(device: torch.device) -> Loop:
    """Half floats with a scaled loss; every second step overflows and is skipped."""
    model = convolutions().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
    for number in range(BOUNDARIES):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(4, 3, 8, 8, device=device)).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss * (float("inf") if number % 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss, model, optimizer, scaler, scaler._scale, scaler._growth_tracker


@case
def channels_last(device: torch.device) -> Loop:
    model = convolutions().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    for _ in range(BOUNDARIES):
        batch = torch.randn(4, 3, 8, 8, device=device).to(memory_format=torch.channels_last)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, model, optimizer


@case
def recurrent_state(device: torch.device) -> Loop:
    network, head = nn.LSTM(8, 16, num_layers=2, dropout=0.2).to(device), nn.Linear(16, 1).to(device)
    optimizer = torch.optim.RMSprop([*network.parameters(), *head.parameters()])
    state = torch.zeros(2, 3, 16, device=device), torch.zeros(2, 3, 16, device=device)
    for _ in range(BOUNDARIES):
        output, state = network(torch.randn(5, 3, 8, device=device), state)
        loss = head(output).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = state[0].detach(), state[1].detach()
        yield loss, state, network, head, optimizer


@case
def several_generators(device: torch.device) -> Loop:
    own, model = torch.Generator(device).manual_seed(5), mlp().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(BOUNDARIES):
        batch = torch.randn(4, 16, device=device, generator=own) + torch.rand(4, 16, device=device)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, model, own.get_state()


@case
def several_streams(device: torch.device) -> Loop:
    """A side stream prepares the next batch; work is under way at every boundary."""
    side, model = torch.cuda.Stream(device), mlp().to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def prepare() -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            return torch.randn(4, 16, device=device).cumsum(0)

    batch = prepare()
    for _ in range(BOUNDARIES):
        torch.cuda.current_stream(device).wait_stream(side)
        batch.record_stream(torch.cuda.current_stream(device))
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch = prepare()
        yield loss, model, batch


@case
def moving_average_and_hooks(device: torch.device) -> Loop:
    model = mlp().to(device)
    average = copy.deepcopy(model)
    norms: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
    optimizer = torch.optim.NAdam(model.parameters())
    for _ in range(BOUNDARIES):
        loss = model(torch.randn(4, 16, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
        yield loss, model, average, norms


@case
def checkpointed_activations(device: torch.device) -> Loop:
    """Dropout is drawn again in the backward pass, from the generator's saved state."""
    model = mlp().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(BOUNDARIES):
        batch = torch.randn(4, 16, device=device, requires_grad=True)
        hidden = checkpoint(model[:3], batch, use_reentrant=False)
        loss = model[3](hidden).square().mean()
        yield loss, model
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@case
def shared_storages(device: torch.device) -> Loop:
    """Tied weights, flat gradients, and views with strides of their own."""
    flat = torch.randn(64, device=device)
    weight = nn.Parameter(flat[:48].view(6, 8))
    view, reverse = flat[8:56:3], flat[16:].view(6, 8).t()
    for _ in range(BOUNDARIES):
        loss = (weight @ torch.randn(8, 2, device=device)).square().mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight.sub_(0.1 * gradient)
            reverse.mul_(0.99)
        yield loss, flat, view, reverse, weight


def _compiled(device: torch.device, backend: str) -> Iterator[Any]:
    torch._dynamo.reset()
    model = mlp().to(device)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(BOUNDARIES):
        loss = compiled(torch.randn(4, 16, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, model, optimizer
    torch._dynamo.reset()


CASES["compiled_eager"] = lambda device: _compiled(device, "eager")
CASES["compiled_aot_eager"] = lambda device: _compiled(device, "aot_eager")
