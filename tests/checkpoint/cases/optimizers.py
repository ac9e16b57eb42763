"""Every optimizer of torch.optim, in each of its implementations that this torch has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .registry import BOUNDARIES, CASES, Loop, case, loss_of, mlp

_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{}, {"foreach": True}],
    "Adadelta": [{}, {"foreach": True}],
    "Adafactor": [{}, {"foreach": True}],
    "Adagrad": [{}, {"foreach": True}, {"fused": True}],
    "Adam": [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}],
    "AdamW": [{}, {"foreach": True}, {"fused": True}],
    "Adamax": [{}, {"foreach": True}],
    "NAdam": [{}, {"foreach": True}],
    "RAdam": [{}, {"foreach": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True}, {"foreach": True}],
    "Rprop": [{}, {"foreach": True}],
    "SGD": [{}, {"momentum": 0.9, "nesterov": True}, {"foreach": True, "momentum": 0.9}, {"fused": True}],
}
#: These need a case of their own, below.
_SPECIAL = {"LBFGS", "SparseAdam", "Muon", "Optimizer"}


def all_optimizers() -> set[str]:
    """Names of the optimizers that this torch has."""
    return {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }


def covered_optimizers() -> set[str]:
    """Names of those that have a case here."""
    return _OPTIONS.keys() | _SPECIAL


def _train(make: Callable[[Any], torch.optim.Optimizer]) -> Loop:
    model = mlp()
    optimizer = make(model.parameters())
    for _ in range(BOUNDARIES):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        yield loss, model, optimizer


def _register() -> None:
    for name, variants in _OPTIONS.items():
        kind = getattr(torch.optim, name, None)
        for options in variants if kind else ():
            label = "-".join([name.lower(), *options])
            CASES[label] = partial(_train, partial(kind, lr=0.01, **options))


_register()


@case
def lbfgs() -> Loop:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    torch.manual_seed(1)
    inputs, labels = torch.randn(16, 32), torch.randint(0, 4, (16,))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        return loss

    for _ in range(BOUNDARIES):
        yield optimizer.step(closure), model, optimizer, closure  # type: ignore[arg-type]


@case
def sparse_adam() -> Loop:
    table = torch.nn.Embedding(1000, 16, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    for _ in range(BOUNDARIES):
        optimizer.zero_grad()
        loss = table(torch.randint(0, 1000, (32,))).square().sum()
        loss.backward()
        optimizer.step()
        yield loss, table, optimizer


if hasattr(torch.optim, "Muon"):

    @case
    def muon() -> Loop:
        matrix = torch.nn.Linear(32, 4, bias=False)
        optimizer = torch.optim.Muon(matrix.parameters(), lr=0.01)
        for _ in range(BOUNDARIES):
            optimizer.zero_grad()
            loss = loss_of(matrix)
            loss.backward()
            optimizer.step()
            yield loss, matrix, optimizer


@case
def step_inside_backward() -> Loop:
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.01, momentum=0.9) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(BOUNDARIES):
        loss = loss_of(model)
        loss.backward()
        yield loss, model, list(optimizers.values())
