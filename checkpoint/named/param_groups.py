"""An optimizer's parameter groups and state, as a restarted process finds them and makes them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from gpuslice.checkpoint.discover.tensor_parts import strided_parts
from gpuslice.checkpoint.format.nodes import OptimizerNode
from gpuslice.errors import RefusedSnapshotError

from .describe import named_tensors, unwrapped


def tensors_by_name(
    named: Mapping[str, object], within: frozenset[int] = frozenset()
) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of attached modules, and attached tensors, by their whole names.

    Containers whose ids are in ``within``, which contain themselves, are left out.
    """
    found: dict[str, torch.Tensor] = {}
    for name, item in named.items():
        if id(item) in within:
            continue
        if isinstance(item, torch.nn.Module):
            parts = named_tensors(unwrapped(item))
            found |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        elif isinstance(item, torch.Tensor):
            found[name] = item
        elif isinstance(item, (list, tuple)):
            parts = {f"{name}[{index}]": part for index, part in enumerate(item)}
            found |= tensors_by_name(parts, within | {id(item)})
        elif isinstance(item, dict):
            parts = {f"{name}[{key!r}]": part for key, part in item.items()}
            found |= tensors_by_name(parts, within | {id(item)})
    return found


def parameters(
    node: OptimizerNode, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], path: str
) -> list[list[torch.Tensor]]:
    """Return each group's parameters as they were saved: the live ones, or others found by their saved names.

    Raises
    ------
    RefusedSnapshotError
        If they have other shapes, or attached modules have none of that name.
    """
    here = [list(group["params"]) for group in optimizer.param_groups]
    if _shapes(here) == node.shapes and len(node.groups) == len(here):
        return here
    refusal = RefusedSnapshotError(
        f"{path} has other parameter groups than were saved",
        "restore into the objects of the script that wrote the snapshot, and attach the module, too",
    )
    try:
        found = [[tensors[name] for name in names] for names in node.names]
    except KeyError as error:
        raise refusal from error
    if _shapes(found) != node.shapes or len(node.groups) != len(found):
        raise refusal
    return found


def _shapes(groups: Sequence[Sequence[torch.Tensor]]) -> list[list[list[int]]]:
    return [[list(parameter.shape) for parameter in group] for group in groups]


def arrange(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[torch.Tensor]]) -> None:
    """Make an optimizer's groups hold these parameters, in place. Groups are added and removed as needed."""
    del optimizer.param_groups[len(groups) :]
    for index, group in enumerate(groups):
        if index == len(optimizer.param_groups):
            optimizer.param_groups.append({"params": []})
        optimizer.param_groups[index]["params"][:] = group


def own_state(optimizer: torch.optim.Optimizer) -> dict[Any, dict[Any, Any]]:
    """Return an optimizer's state by parameter, except state on another device or in shared memory."""
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
    parts = [part for tensor in tensors for part in strided_parts(tensor)]
    if len({part.untyped_storage()._cdata for part in parts}) < len(parts):
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


def skip_groups_that_are_there(optimizers: Iterable[torch.optim.Optimizer]) -> Callable[[], None]:
    """Make ``add_param_group`` ignore groups that were restored already. Return a function that ends it.

    A restarted script runs the code before its pass again, and with it an ``add_param_group`` of before.
    """
    changed = [optimizer for optimizer in optimizers if "add_param_group" not in vars(optimizer)]
    for optimizer in changed:
        _skip(optimizer)

    def end() -> None:
        for optimizer in changed:
            vars(optimizer).pop("add_param_group", None)

    return end


def _skip(optimizer: Any) -> None:
    add = optimizer.add_param_group

    def add_if_new(group: dict[str, Any]) -> None:
        given = group["params"]
        params = [given] if isinstance(given, torch.Tensor) else list(given)
        plain = [one[1] if isinstance(one, tuple) else one for one in params]
        for known in optimizer.param_groups:
            if [*map(id, known["params"])] == [*map(id, plain)]:
                return
        add({**group, "params": params})

    optimizer.add_param_group = add_if_new
