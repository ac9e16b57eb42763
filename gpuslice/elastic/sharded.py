"""The state of parameters that are divided among ranks (FSDP2): gathered, and divided for other ranks.

A script's function makes modules and their optimizers for the present process group. Their state is gathered
on rank 0 as plain tensors, by the names of torch.distributed.checkpoint. It is given to all ranks of the next
group, and each takes its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gpuslice.errors import UsageError

#: A function that makes modules, optimizers and schedulers by name, for the present process group.
Build = Callable[[], Mapping[str, Any]]
_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
_WHOLE = StateDictOptions(full_state_dict=True)


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> object: ...


class Sharded:
    """The objects that a script's function has made for one process group.

    Parameters
    ----------
    built
        The objects, by name.
    width
        Number of ranks in the group.

    Raises
    ------
    UsageError
        If something is not possible, naming it.
    """

    def __init__(self, built: Mapping[str, Any], width: int) -> None:
        self.built = dict(built)
        self.modules = {name: one for name, one in built.items() if isinstance(one, torch.nn.Module)}
        self.optimizers = {name: one for name, one in built.items() if isinstance(one, torch.optim.Optimizer)}
        self._others: dict[str, _Stateful] = {}
        for name, one in built.items():
            if name not in self.modules and name not in self.optimizers:
                if not isinstance(one, _Stateful):
                    raise UsageError(f"{name} has no state_dict and load_state_dict", "attach it instead")
                self._others[name] = one
        if not self.modules:
            raise UsageError("the function given as build= has made no module", "return it by name: a dict")
        for name, module in self.modules.items():
            _check(name, module, width)

    def gather(self) -> dict[str, Any]:
        """Return the whole state, on rank 0 in host memory, elsewhere nothing; a collective.

        Raises
        ------
        UsageError
            If an optimizer steps what is in no module.
        """
        models = {
            name: _plain(get_model_state_dict(one, options=_GATHERED)) for name, one in self.modules.items()
        }
        together = torch.nn.ModuleDict(self.modules)
        optimizers = {
            name: _plain(get_optimizer_state_dict(together, one, options=_GATHERED))
            for name, one in self.optimizers.items()
        }
        if dist.get_rank():
            return {}
        others = {name: _plain(one.state_dict()) for name, one in self._others.items()}
        return {"modules": models, "optimizers": optimizers, "others": others}

    def load(self, whole: Mapping[str, Any]) -> None:
        """Load this rank's parts of ``whole``, which all ranks have; a collective."""
        for name, module in self.modules.items():
            set_model_state_dict(module, whole["modules"][name], options=_WHOLE)
        together = torch.nn.ModuleDict(self.modules)
        for name, optimizer in self.optimizers.items():
            saved = whole["optimizers"][name]
            kept = (value for values in saved["state"].values() for value in values.values())
            if any(isinstance(value, torch.Tensor) and value.dim() for value in kept):
                set_optimizer_state_dict(together, optimizer, saved, options=_WHOLE)
            else:  # torch refuses one that keeps nothing of its parameters, as plain SGD
                for group, known in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                    group.update({key: value for key, value in known.items() if key != "params"})
        for name, other in self._others.items():
            other.load_state_dict(whole["others"][name])


def _check(name: str, module: torch.nn.Module, width: int) -> None:
    """Refuse modules divided in other ways. Make FSDP add up gradients, as micro-batches have weights."""
    for path, parameter in module.named_parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if mesh is not None and (mesh.ndim != 1 or mesh.size() != width):
            raise UsageError(
                f"{name}.{path} is on a mesh {tuple(mesh.shape)}, not on all {width} ranks in one dimension",
                "leave out mesh=: fully_shard divides it among all ranks",
            )
    for part in module.modules():
        if isinstance(part, FSDPModule):
            _add_up(part)


def _add_up(module: FSDPModule) -> None:
    """Make FSDP add up gradients."""
    if not hasattr(module, "set_force_sum_reduction_for_comms"):
        raise UsageError("this torch cannot add gradients of fully_shard up", "install torch 2.9 or newer")
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _plain(value: Any) -> Any:
    """Return the value with plain dictionaries, in the same order."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
