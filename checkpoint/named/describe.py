"""Describe live objects as nodes: which objects ``gpuslice.attach`` accepts, and the node of each kind.

Nothing is copied here. Tensors are collected as they are, on their devices, in the order in which the nodes
refer to them. The writer of the snapshot copies their storages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader

from gpuslice.checkpoint.discover.tensor_parts import SPARSE_PARTS, strided_parts
from gpuslice.checkpoint.format.nodes import (
    AnyTensorNode,
    ArrayNode,
    DictNode,
    GeneratorNode,
    ListNode,
    LoaderNode,
    ModuleNode,
    Node,
    OptimizerNode,
    QuantizedNode,
    SparseNode,
    StatefulNode,
    TensorNode,
    TupleNode,
    UnsavedNode,
    ValueNode,
)
from gpuslice.errors import UsageError

from . import classes, containers, gradient_buckets, shards, subclasses
from .generators import Generator, generator_state, own_generators

#: Names with this prefix are the runtime's, not the user's.
OWN_PREFIX = "gpuslice."
_SCALARS = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
_MAX_DEPTH = 48


def is_holder(value: object) -> bool:
    """Return True if ``value`` is always loaded in place: a module, an optimizer, a loader or a generator."""
    return isinstance(value, DataLoader | Generator) or is_stateful(value)


def is_stateful(value: object) -> bool:
    """Return True if ``value`` has ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


@runtime_checkable
class Describable(Protocol):
    """The interface of an object that describes itself for a snapshot."""

    def describe(self, describer: Describer, path: str) -> Node: ...


def keeps_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer's class overrides ``state_dict``. Its own method must then be used."""
    return type(optimizer).state_dict is not torch.optim.Optimizer.state_dict


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside a ``torch.compile`` wrapper: compiled and plain modules share their names."""
    original = getattr(module, "_orig_mod", module)
    return original if isinstance(original, torch.nn.Module) else module


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and all buffers by qualified name; tied ones under each of their names."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return tensors | dict(module.named_buffers(remove_duplicate=False))


def extra_states(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the submodules that define ``get_extra_state``, with their names."""
    for name, part in module.named_modules(remove_duplicate=False):
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            yield name, part


class Describer:
    """Collects nodes and the tensors that they refer to.

    Parameters
    ----------
    names
        Names of the attached tensors, by ``id``.

    Attributes
    ----------
    tensors
        (path, strided tensor) pairs; a ``TensorNode``'s index points here.
    covered, optimized
        Ids of the tensors described, and of the optimizers' parameters with the optimizer's path: what an
        optimizer steps but no attached object saves is an error of the script.
    unsaved
        Objects that the description lacks, and why.
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        self.names = names or {}
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.covered: set[int] = set()
        self.unsaved: list[str] = []
        self.optimized: dict[int, str] = {}
        self._depth = 0

    def node(self, value: Any, path: str) -> Node:
        """Return the node of one object. ``UsageError`` names the path of a part that cannot be saved."""
        if path.startswith(OWN_PREFIX) and isinstance(value, Describable):
            return value.describe(self, path)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UsageError(f"{path} is nested too deeply", "does it contain itself?")
        try:
            return self._node(value, path)
        finally:
            self._depth -= 1

    def _node(self, value: Any, path: str) -> Node:
        if _is_scalar(value):
            return ValueNode.of(value, path)
        if not is_holder(value):
            of_kind = containers.describe(self, value, path)
            if of_kind is not None:
                return of_kind
        for kind, describe in self._kinds():
            if isinstance(value, kind):
                return describe(value, path)
        if is_stateful(value):
            return StatefulNode(self.node(value.state_dict(), f"{path}.state_dict()"))
        raise UsageError(
            f"{path} is {classes.with_article(value)}, which cannot be saved",
            "attach tensors, numbers, text, lists or dicts of them, generators, or an object with state_dict "
            "and load_state_dict",
        )

    def _kinds(self) -> Iterator[tuple[Any, Callable[[Any, str], Node]]]:
        yield torch.Tensor, self.tensor
        yield torch.nn.Module, self._module
        yield torch.optim.Optimizer, self._optimizer
        yield DataLoader, self._loader
        yield Generator, self._generator
        yield np.ndarray, self._array
        yield np.generic, ValueNode.of
        yield Mapping, self.mapping
        yield (list, tuple), self.items

    def tensor(self, tensor: torch.Tensor, path: str) -> AnyTensorNode:
        """Return the node of a tensor of any layout, with the gradient that it keeps."""
        if tensor.grad_fn is not None and not tensor.is_leaf:
            raise UsageError(
                f"{path} is part of an autograd graph, which cannot be saved", "attach x.detach()"
            )
        if shards.is_distributed(tensor):
            self.covered.add(id(tensor))
            return shards.shard_node(tensor, path, self._strided)
        self.covered.add(id(tensor))
        if subclasses.is_of_own_class(tensor):
            node = subclasses.describe(tensor, path, self.tensor, self._strided)
            if isinstance(node, UnsavedNode):
                self.unsaved.append(node.reason)
            return node
        if tensor.layout is not torch.strided:
            return self._sparse(tensor, path)
        if tensor.is_quantized:
            return self._quantized(tensor, path)
        grad = None
        if tensor.grad is not None:
            described = self.tensor(tensor.grad.detach(), f"{path}.grad")
            grad = described if isinstance(described, (TensorNode, SparseNode)) else None
        return self._strided(tensor, path, grad)

    def _strided(
        self, tensor: torch.Tensor, path: str, grad: TensorNode | SparseNode | None = None
    ) -> TensorNode:
        # Lazy conjugation and negation live in the tensor, not in its bytes.
        plain = tensor.detach().resolve_conj().resolve_neg()
        self.tensors.append((path, plain))
        return TensorNode(len(self.tensors) - 1, str(tensor.device), tensor.requires_grad, grad)

    def _sparse(self, tensor: torch.Tensor, path: str) -> SparseNode:
        if tensor.layout not in SPARSE_PARTS:
            raise UsageError(
                f"{path} has layout {tensor.layout}, which cannot be saved", "attach it as a strided tensor"
            )
        parts = enumerate(strided_parts(tensor.detach()))
        nodes = [self._strided(part, f"{path}[{number}]") for number, part in parts]
        coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
        return SparseNode(
            str(tensor.layout).removeprefix("torch."),
            tuple(tensor.shape),
            nodes,
            coalesced,
            tensor.requires_grad,
        )

    def _quantized(self, tensor: torch.Tensor, path: str) -> QuantizedNode:
        if tensor.qscheme() is torch.per_tensor_affine:
            scales = [
                torch.tensor(tensor.q_scale(), dtype=torch.float64),
                torch.tensor(tensor.q_zero_point()),
            ]
            axis = None
        else:
            scales = [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
            axis = tensor.q_per_channel_axis()
        parts = [tensor.int_repr(), *scales]
        return QuantizedNode([self._strided(part, f"{path}[{n}]") for n, part in enumerate(parts)], axis)

    def _array(self, array: np.ndarray[Any, Any], path: str) -> ArrayNode:
        try:
            # A copy, because a tensor over NumPy's memory is a storage of another kind.
            tensor = torch.from_numpy(np.array(array, order="C"))
        except TypeError as error:
            raise UsageError(
                f"{path} is an array of {array.dtype}, which cannot be saved", "attach arrays of numbers"
            ) from error
        return ArrayNode(self._strided(tensor, path))

    def _module(self, module: torch.nn.Module, path: str) -> ModuleNode:
        module = unwrapped(module)
        return ModuleNode(
            tensors={name: self.tensor(t, f"{path}.{name}") for name, t in named_tensors(module).items()},
            training={name: part.training for name, part in module.named_modules(remove_duplicate=False)},
            extra={
                name: self.node(part.get_extra_state(), f"{path}.{name}.get_extra_state()")
                for name, part in extra_states(module)
            },
            buckets={
                name: buckets
                for name, part in gradient_buckets.replicated_parts(module)
                if (buckets := gradient_buckets.layout(part))
            },
        )

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> Node:
        if keeps_own_state_dict(optimizer):
            return StatefulNode(self.node(optimizer.state_dict(), f"{path}.state_dict()"))
        groups: list[DictNode | ValueNode] = []
        number: dict[torch.Tensor, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append(self.mapping(options, f"{path}.param_groups[{index}]"))
            for parameter in group["params"]:
                number[parameter] = len(number)
                self.optimized[id(parameter)] = path
        state: dict[int, Node] = {}
        shared: dict[str, Node] = {}
        keys: dict[Any, Any] = optimizer.state
        for key, value in keys.items():
            if isinstance(key, str):
                shared[key] = self.node(value, f"{path}.state[{key!r}]")
            elif key in number:
                state[number[key]] = self.node(value, f"{path}.state[{number[key]}]")
            else:
                raise UsageError(
                    f"{path} keeps state of a parameter in none of its groups", "remove that state"
                )
        return OptimizerNode(
            groups=groups,
            shapes=[[list(p.shape) for p in group["params"]] for group in optimizer.param_groups],
            state=state,
            shared=shared,
            devices={index: str(parameter.device) for parameter, index in number.items()},
            names=[[self.names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups],
        )

    def _loader(self, loader: DataLoader[Any], path: str) -> LoaderNode:
        generators = enumerate(own_generators(loader))
        return LoaderNode([self._generator(item, f"{path}.generator[{index}]") for index, item in generators])

    def _generator(self, generator: Generator, path: str) -> GeneratorNode:
        library, state = generator_state(generator)
        return GeneratorNode(library, self.node(state, path))

    def mapping(self, mapping: Mapping[Any, Any], path: str) -> DictNode | ValueNode:
        """Return the node of a dictionary's items."""
        for key in mapping:
            if not _is_key(key):
                raise UsageError(
                    f"{path} has {classes.with_article(key)} as a key, which cannot be saved",
                    "use text or numbers as keys",
                )
        if all(map(_is_scalar, mapping.values())):
            return ValueNode.of(dict(mapping), path)
        items = {key: self.node(item, f"{path}[{key!r}]") for key, item in mapping.items()}
        return DictNode.of(items, path)

    def items(self, sequence: Sequence[Any], path: str) -> Node:
        """Return the node of the items of a list or tuple."""
        if all(map(_is_scalar, sequence)):
            return ValueNode.of(tuple(sequence) if isinstance(sequence, tuple) else list(sequence), path)
        items = [self.node(item, f"{path}[{index}]") for index, item in enumerate(sequence)]
        return TupleNode(items) if isinstance(sequence, tuple) else ListNode(items)


def _is_scalar(value: object) -> bool:
    return type(value) in _SCALARS


def _is_key(value: object) -> bool:
    return all(map(_is_key, value)) if isinstance(value, tuple) else _is_scalar(value)
