"""The matrix's cases: small trainings that yield, at every boundary, all the state they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

#: What a case yields: everything that must be bit for bit the same.
Loop = Iterator[tuple[Any, ...]]
CASES: dict[str, Callable[[], Loop]] = {}
BOUNDARIES = 3


def case(function: Callable[[], Loop]) -> Callable[[], Loop]:
    """Register a case under its function's name."""
    CASES[function.__name__.strip("_")] = function
    return function


def mlp(*, dropout: bool = False) -> torch.nn.Sequential:
    """A small network with parameters of several sizes and, through batch norm, buffers."""
    middle: torch.nn.Module = torch.nn.Dropout(0.3) if dropout else torch.nn.Identity()
    return torch.nn.Sequential(
        torch.nn.Linear(32, 128), torch.nn.BatchNorm1d(128), torch.nn.ReLU(), middle, torch.nn.Linear(128, 4)
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Sixteen random samples, from torch's shared generator."""
    return torch.randn(16, 32), torch.randint(0, 4, (16,))


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    """Cross entropy of a fresh batch."""
    inputs, labels = batch()
    loss: torch.Tensor = torch.nn.functional.cross_entropy(model(inputs), labels)
    return loss
