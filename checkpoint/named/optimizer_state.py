"""Which of an optimizer's state may be loaded in place."""

from __future__ import annotations

from typing import Any

import torch


def own_state(optimizer: torch.optim.Optimizer) -> dict[Any, dict[Any, Any]]:
    """By parameter, the state that may be loaded in place: beside its parameter, and nobody else's memory."""
    states = {
        parameter: state
        for parameter, state in optimizer.state.items()
        if isinstance(parameter, torch.Tensor) and type(state) is dict
    }
    tensors = [
        value for state in states.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    if any(value.layout is not torch.strided for value in tensors):
        return {}
    if len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors):
        return {}
    return {
        parameter: state
        for parameter, state in states.items()
        if all(
            value.device == parameter.device
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and name != "step"
        )
    }
