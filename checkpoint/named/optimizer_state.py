"""What an optimizer keeps of its parameters, thousands of tensors: compared and loaded together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, compress
from operator import not_
from typing import Any, NamedTuple

import torch

from gpuslice.checkpoint.format.nodes import DictNode, TensorNode

from . import plain_tensors
from .containers import refill_settled
from .snapshot_tensors import Maker, Source

_HOST = torch.device("cpu")


class _Kept(NamedTuple):
    """Of one parameter."""

    parameter: torch.Tensor
    keys: tuple[Any, ...]
    nodes: Sequence[TensorNode]
    live: Mapping[Any, Any] | None
    others: dict[Any, Callable[[Maker], Any]]
    on_host: Sequence[bool]


class OptimizerStates:
    """State of parameters that were on one device and are on one device now.

    Parameters
    ----------
    recorded, device
        The two.
    """

    def __init__(self, source: Source, recorded: str, device: torch.device) -> None:
        self._source = source
        self._recorded = recorded
        self._device = device
        self._kept: list[_Kept] = []

    def add(
        self,
        parameter: torch.Tensor,
        saved: DictNode,
        live: Mapping[Any, Any] | None,
        others: dict[Any, Callable[[Maker], Any]],
        *,
        step_moves: bool,
    ) -> None:
        """Take a parameter's state.

        Parameters
        ----------
        live
            What is there.
        others
            How to load what is no plain tensor, by key.
        step_moves
            Whether ``step`` goes where the parameter is, as torch has it for fused and capturable updates.
        """
        keys = saved.keys
        nodes = [item for item in saved.items if isinstance(item, TensorNode)]
        plain_keys = [key for key in keys if key not in others]
        on_host = [
            key == "step" and node.device == "cpu" and not step_moves
            for key, node in zip(plain_keys, nodes, strict=True)
        ]
        self._kept.append(_Kept(parameter, keys, nodes, live, others, on_host))

    def compare(self) -> Callable[[Maker], dict[torch.Tensor, Any]]:
        """A function that loads all that was added, and gives it by parameter."""
        kept = self._kept
        nodes = list(chain.from_iterable(one.nodes for one in kept))
        lives = [
            None if one.live is None else one.live.get(key)
            for one in kept
            for key in one.keys
            if key not in one.others
        ]
        on_host = list(chain.from_iterable(one.on_host for one in kept))
        self._source.verify(nodes)
        load_tensors = self._on_both(nodes, lives, on_host)

        def load(maker: Maker) -> dict[torch.Tensor, Any]:
            beside = maker.onto(self._recorded, self._device)
            tensors = iter(load_tensors(beside))
            return {
                one.parameter: refill_settled(
                    beside,
                    one.live,
                    {
                        key: one.others[key](beside) if key in one.others else next(tensors)
                        for key in one.keys
                    },
                )
                for one in kept
            }

        return load

    def _on_both(
        self, nodes: Sequence[TensorNode], lives: Sequence[Any], on_host: Sequence[bool]
    ) -> plain_tensors.Loads:
        """Those that stay on the host, and those that go where their parameters are."""
        beside = list(map(not_, on_host))
        load_beside, load_on_host = (
            plain_tensors.into_or_new(
                self._source, list(compress(nodes, those)), list(compress(lives, those)), device
            )
            for those, device in ((beside, None), (on_host, _HOST))
        )

        def load(maker: Maker) -> list[torch.Tensor]:
            near, far = iter(load_beside(maker)), iter(load_on_host(maker))
            return [next(far if host else near) for host in on_host]

        return load


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
    if len({storage._cdata for storage in map(torch.Tensor.untyped_storage, tensors)}) < len(tensors):
        return {}
    if len({tensor.device for tensor in (*tensors, *states)}) <= 1:
        return states
    return {
        parameter: state
        for parameter, state in states.items()
        if all(
            value.device == parameter.device
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and name != "step"
        )
    }
