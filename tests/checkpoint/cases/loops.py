"""Shapes of training loops: accumulation, mixed precision, GAN, schedules, averages, pending graphs."""

from __future__ import annotations

import torch
from torch.optim import lr_scheduler, swa_utils

from .registry import BOUNDARIES, CASES, Loop, case, loss_of, mlp


@case
def dropout() -> Loop:
    model = mlp(dropout=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(BOUNDARIES):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        yield loss, model, optimizer


@case
def gan() -> Loop:
    maker, critic = torch.nn.Linear(8, 32), mlp()
    optimizers = torch.optim.Adam(maker.parameters()), torch.optim.RMSprop(critic.parameters())
    for _ in range(BOUNDARIES):
        made = maker(torch.randn(16, 8))
        critic_loss = critic(made.detach()).mean() - critic(torch.randn(16, 32)).mean()
        optimizers[1].zero_grad()
        critic_loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        maker_loss = -critic(made).mean()
        maker_loss.backward()
        optimizers[0].step()
        yield critic_loss, maker_loss, maker, critic, optimizers


@case
def accumulation() -> Loop:
    """Boundaries lie between micro-batches, where gradients are half summed."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(2 * BOUNDARIES):
        loss = loss_of(model) / 3
        loss.backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        yield loss, model, optimizer


@case
def zeroed_gradients() -> Loop:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(BOUNDARIES):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield loss, model, optimizer


@case
def grad_scaler() -> Loop:
    """Every second step overflows and is skipped."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for number in range(2 * BOUNDARIES):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model)
        scaler.scale(loss * (float("inf") if number % 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss, model, optimizer, scaler, scaler._scale, scaler._growth_tracker


_SCHEDULES = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
}


def _scheduled(name: str) -> Loop:
    model = mlp()
    # A tensor as the learning rate is what capturable optimizers use.
    rate = torch.tensor(0.05) if name == "step" else 0.05
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
    schedule = _SCHEDULES[name](optimizer)
    for _ in range(BOUNDARIES):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        schedule.step(*([loss.item()] if name == "plateau" else []))
        yield loss, model, optimizer, optimizer.param_groups[0]["lr"], schedule.get_last_lr()


def _register() -> None:
    for name in _SCHEDULES:
        CASES[f"schedule-{name}"] = lambda name=name: _scheduled(name)


_register()


@case
def moving_averages() -> Loop:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    swa = swa_utils.AveragedModel(model)
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(BOUNDARIES):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        swa.update_parameters(model)
        for name, parameter in model.named_parameters():
            own[name].lerp_(parameter.detach(), 0.1)
        yield loss, model, optimizer, ema, swa, own


@case
def pending_graph() -> Loop:
    """A boundary between forward and backward: autograd's saved tensors must stay valid."""
    model = mlp(dropout=True)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(BOUNDARIES):
        optimizer.zero_grad()
        loss = loss_of(model)
        yield loss, model, optimizer
        loss.backward()
        yield loss, model, optimizer
        optimizer.step()


@case
def truncated_backpropagation() -> Loop:
    """The graph of one boundary is used again after the next."""
    cell = torch.nn.GRUCell(8, 300)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.01)
    hidden = torch.zeros(16, 300)
    for number in range(2 * BOUNDARIES):
        hidden = cell(torch.randn(16, 8), hidden)
        loss = hidden.square().mean()
        if number % 3 == 2:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            hidden = hidden.detach()
        yield loss, hidden, cell, optimizer


@case
def double_backward() -> Loop:
    weight = torch.randn(64, 64, requires_grad=True)
    for _ in range(BOUNDARIES):
        loss = (weight * torch.rand(64, 64)).sin().sum()
        (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
        yield loss, slope, weight
        slope.square().sum().backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad  # type: ignore[operator]
        weight.grad = None
