"""torch swaps no tensor that has weak references, as those have that a look at the heap has seen."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from . import heap


@functools.cache
def keep_tensors_swappable() -> None:
    """Have ``torch.utils.swap_tensors`` (and with it ``Module.to``) find tensors as if nobody had looked.

    What looks remember is forgotten then; the next one sees everything again.
    """
    original: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors

    @functools.wraps(original)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        heap.give_back()
        original(t1, t2)

    torch.utils.swap_tensors = swap_tensors
