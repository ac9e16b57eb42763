"""Load nodes into live objects, in two steps: everything is checked before anything is changed.

``Checker.check`` compares a node with the live object that it is meant for, and returns a ``Load``: a
function that, given a ``Maker``, restores the recorded state and returns the result (the live object if it
was loaded in place, else a new value).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader

from gpuslice.checkpoint.format.nodes import (
    HOLDERS,
    AnyTensorNode,
    ArrayNode,
    DictNode,
    FlattenedNode,
    GeneratorNode,
    KindNode,
    ListNode,
    LoaderNode,
    ModuleNode,
    Node,
    OptimizerNode,
    QuantizedNode,
    ShardNode,
    SparseNode,
    StatefulNode,
    TensorNode,
    TupleNode,
    UnsavedNode,
    ValueNode,
)
from gpuslice.errors import RefusedSnapshotError

from . import containers, gradient_buckets, param_groups, subclasses
from .containers import refill
from .describe import (
    extra_states,
    is_holder,
    is_stateful,
    named_tensors,
    unwrapped,
)
from .generators import (
    Generator,
    check_generator_state,
    generator_state,
    own_generators,
    set_generator_state,
)
from .plain_objects import attributes
from .shards import load_shard
from .snapshot_tensors import (
    Maker,
    Source,
    alike,
    check_device,
    into,
    into_or_new,
    is_plain,
    same_bits,
)

Load = Callable[[Maker], Any]

_HOST = torch.device("cpu")
_REMEDY = "restore into the objects of the script that wrote the snapshot"


@runtime_checkable
class Comparable(Protocol):
    """The interface of an object that compares itself with a snapshot's node."""

    def compare(self, checker: Checker, node: Node, path: str) -> Load: ...


class Checker:
    """Compares nodes with live objects. Nothing changes before a returned ``Load`` is called.

    Attributes
    ----------
    devices
        Where the tensors of each recorded device live now, as far as live tensors showed it.
    """

    def __init__(self, source: Source, *, like: Checker | None = None) -> None:
        self.source = source
        #: Attached tensors by name.
        self.tensors: Mapping[str, torch.Tensor] = {} if like is None else like.tensors
        #: True if the snapshot has the attributes of objects, too.
        self.with_attributes: bool = like is not None and like.with_attributes
        self.devices: dict[str, torch.device] = {} if like is None else like.devices
        #: Plain tensors that exist under names: entries, live tensors, paths.
        self._named: list[tuple[TensorNode, torch.Tensor, str]] = [] if like is None else like._named
        #: Generators, functions that load their states, paths.
        self._generators: list[tuple[Generator, Load, str]] = [] if like is None else like._generators

    def check(self, node: Node, live: Any, path: str) -> Load:
        """Prepare to load ``node`` into ``live``; ``SnapshotError`` names the path of what does not fit."""
        if isinstance(live, Comparable):
            return live.compare(self, node, path)
        if isinstance(node, HOLDERS) or is_holder(live):
            return self._holder(node, live, path)
        if isinstance(node, AnyTensorNode):
            return self._loose_tensor(node, live, path)
        if isinstance(node, ArrayNode):
            return self._array(node, live)
        if isinstance(node, DictNode):
            return self._dict(node, live, path, {})
        if isinstance(node, (ListNode, TupleNode)):
            return self._sequence(node, live, path)
        if isinstance(node, KindNode):
            return self._kind(node, live, path)
        if not isinstance(node, ValueNode):
            raise RefusedSnapshotError(f"{path} was saved as a node that only attributes can have", _REMEDY)
        value = node.value()
        return lambda _maker: refill(live, copy.deepcopy(value))

    def _kind(self, node: KindNode, live: Any, path: str) -> Load:
        filling = containers.filling(node, live, path)
        content, own = self.content(node, live, path)

        def load(maker: Maker) -> Any:
            target = None if filling.target is None else filling.target()
            return filling.fill(target, content(maker), own(maker))

        return load

    def content(self, node: KindNode, live: Any, path: str) -> tuple[Load, Load]:
        """Prepare to load what a container or data object holds, and its attributes, as new values."""
        content = self.check(node.data, containers.known_parts(node, live), path)
        if node.attributes is None:
            return content, lambda _maker: {}
        return content, self.check(node.attributes, dict(attributes(live)), path)

    def _dict(self, node: DictNode, live: Any, path: str, known_loads: Mapping[Any, Load]) -> Load:
        known = live if isinstance(live, Mapping) else {}
        loads = {
            key: known_loads.get(key) or self.check(item, known.get(key), f"{path}[{key!r}]")
            for key, item in zip(node.keys, node.items, strict=True)
        }
        return lambda maker: refill(live, {key: load(maker) for key, load in loads.items()})

    def _sequence(self, node: ListNode | TupleNode, live: Any, path: str) -> Load:
        known = list(live) if isinstance(live, (list, tuple, deque)) else []
        known += [None] * (len(node.items) - len(known))
        items = enumerate(zip(node.items, known, strict=False))
        loads = [self.check(item, part, f"{path}[{index}]") for index, (item, part) in items]
        kind = list if isinstance(node, ListNode) else tuple
        return lambda maker: refill(live, kind(load(maker) for load in loads))

    def _holder(self, node: Node, live: Any, path: str) -> Load:
        if isinstance(node, ModuleNode) and isinstance(live, torch.nn.Module):
            return self._module(node, unwrapped(live), path)
        if isinstance(node, OptimizerNode) and isinstance(live, torch.optim.Optimizer):
            return self._optimizer(node, live, path)
        if isinstance(node, LoaderNode) and isinstance(live, DataLoader):
            return self._loader(node, live, path)
        if isinstance(node, GeneratorNode) and isinstance(live, Generator):
            return self._generator(node, live, path)
        if isinstance(node, StatefulNode) and is_stateful(live):
            load = self.check(node.state, live.state_dict(), f"{path}.state_dict()")
            return lambda maker: _call(live, live.load_state_dict, load(maker))
        kind = type(node).__struct_config__.tag
        raise RefusedSnapshotError(f"{path} is a {type(live).__name__} here, but a {kind} was saved", _REMEDY)

    def named_tensor(self, node: AnyTensorNode, live: torch.Tensor, path: str) -> Load:
        """Prepare to load a tensor in place that exists under a name. Layout, shape and dtype must fit."""
        if isinstance(node, ShardNode):
            return self._shard(node, live, live, path)
        subclasses.verify(self.source, node, path)
        if isinstance(node, FlattenedNode):
            return subclasses.load(self.source, node, live, path, named=True)
        assert not isinstance(node, UnsavedNode)
        if isinstance(node, TensorNode) and is_plain(live):
            spec = self.source.spec(node)
            if not alike(spec, live):
                found = f"{str(live.dtype).removeprefix('torch.')} {tuple(live.shape)}"
                raise RefusedSnapshotError(
                    f"{path} is {found} here, but {spec.dtype} {spec.shape} was saved", _REMEDY
                )
            self.devices.setdefault(node.device, live.device)
            self._named.append((node, live, path))
            return into(self.source, node, live)
        sparse = isinstance(node, SparseNode) and (f"torch.{node.layout}", node.shape) == (
            str(live.layout),
            tuple(live.shape),
        )
        if not sparse and not (isinstance(node, QuantizedNode) and live.is_quantized):
            raise RefusedSnapshotError(f"{path} has another layout or shape than was saved", _REMEDY)
        return lambda maker: _set_data(live, maker.make(node, live.device))

    def finish(self) -> None:
        """Check what needs all nodes: that generators accept their states, and shared memory gets one value.

        Raise ``RefusedSnapshotError`` if two names of one tensor differ in the snapshot, or if a generator
        cannot continue from its saved state.
        """
        maker = Maker(self.source, {})
        for generator, load, path in self._generators:
            check_generator_state(generator, load(maker), path)
        targets: dict[tuple[Any, ...], tuple[str, TensorNode]] = {}
        for node, live, path in self._named:
            place = (live.data_ptr(), str(live.device), live.dtype, tuple(live.shape), live.stride())
            other, first = targets.setdefault(place, (path, node))
            if not live.data_ptr() or self.source.key(first) == self.source.key(node):
                continue
            if not same_bits(self.source.view(first), self.source.view(node)):
                raise RefusedSnapshotError(
                    f"{other} and {path} are one tensor here, but differed when saved", _REMEDY
                )

    def _shard(self, node: ShardNode, live: Any, like: Any, path: str) -> Load:
        """Prepare to load a distributed tensor; ``like`` says where a new one belongs."""
        load = load_shard(self.source, node, live, like, path)
        self.devices.setdefault(node.local.device, like.device)
        return load

    def _loose_tensor(self, node: AnyTensorNode, live: Any, path: str) -> Load:
        """Prepare to load a tensor of a container: in place if it fits the live one, else as a new tensor."""
        if isinstance(node, ShardNode):
            return self._shard(node, live, live, path)
        subclasses.verify(self.source, node, path)
        if isinstance(node, FlattenedNode):
            return subclasses.load(self.source, node, live, path)
        assert not isinstance(node, UnsavedNode)
        if not isinstance(node, TensorNode):
            return lambda maker: maker.make(node)
        return into_or_new(self.source, node, live)

    def _array(self, node: ArrayNode, live: Any) -> Load:
        self.source.verify(node.data)

        def load(_maker: Maker) -> Any:
            values = self.source.view(node.data).clone().numpy()
            if isinstance(live, np.ndarray) and (live.shape, live.dtype) == (values.shape, values.dtype):
                live[...] = values
                return live
            return values

        return load

    def _module(self, node: ModuleNode, module: torch.nn.Module, path: str) -> Load:
        tensors, extra = named_tensors(module), dict(extra_states(module))
        parts = dict(module.named_modules(remove_duplicate=False))
        _same_names(node.tensors, tensors, path)
        _same_names(node.extra, extra, f"{path}'s extra state")
        _same_names(node.training, parts, f"{path}'s submodules")
        loads = [
            self.named_tensor(saved, tensors[name], f"{path}.{name}") for name, saved in node.tensors.items()
        ]
        extras = {name: self.check(saved, None, f"{path}.{name}") for name, saved in node.extra.items()}

        def load(maker: Maker) -> torch.nn.Module:
            for name, part in gradient_buckets.replicated_parts(module):
                if name in node.buckets and gradient_buckets.layout(part) != node.buckets[name]:
                    gradient_buckets.lay_out(part, node.buckets[name])
            for load_tensor in loads:
                load_tensor(maker)
            for name, training in node.training.items():
                parts[name].training = training
            for name, load_extra in extras.items():
                extra[name].set_extra_state(load_extra(maker))
            return module

        return load

    def _optimizer(self, node: OptimizerNode, optimizer: torch.optim.Optimizer, path: str) -> Load:
        """Prepare to load an optimizer directly: ``load_state_dict`` would cast to the parameters' dtype."""
        groups = param_groups.parameters(node, optimizer, self.tensors, path)
        live = [*optimizer.param_groups, *({} for _ in groups)]
        options = [
            self._options(saved, live[index], f"{path}.param_groups[{index}]")
            for index, saved in enumerate(node.groups)
        ]
        owners = [
            (parameter, group) for members, group in zip(groups, live, strict=False) for parameter in members
        ]
        for number, device in node.devices.items():
            check_device(device, path)
            self.devices.setdefault(device, owners[number][0].device)
        kept = param_groups.own_state(optimizer)
        shared: dict[Any, Load] = {key: self.check(saved, None, path) for key, saved in node.shared.items()}
        states = [
            self._parameter_state(
                saved, *owners[number], node.devices[number], kept, f"{path}.state[{number}]"
            )
            for number, saved in node.state.items()
        ]

        def load(maker: Maker) -> torch.optim.Optimizer:
            param_groups.arrange(optimizer, groups)
            for load_options, group in zip(options, optimizer.param_groups, strict=True):
                refill(group, {"params": group["params"], **load_options(maker)})
            loaded: dict[Any, Any] = {key: load_state(maker) for key, load_state in shared.items()}
            loaded |= {
                owners[number][0]: state(maker) for number, state in zip(node.state, states, strict=True)
            }
            optimizer.state.clear()
            optimizer.state.update(loaded)
            return optimizer

        return load

    def _parameter_state(
        self,
        saved: Node,
        parameter: torch.Tensor,
        group: dict[str, Any],
        recorded: str,
        kept: Mapping[Any, dict[Any, Any]],
        path: str,
    ) -> Load:
        """Prepare to load an optimizer's state of one parameter, which was on ``recorded``.

        The state moves with the parameter, except ``step``: torch keeps it on the host unless the update is
        fused or capturable.
        """
        live, known = kept.get(parameter), dict[Any, Load]()
        there = live or {}
        on_host = not (group.get("capturable") or group.get("fused"))
        if isinstance(saved, DictNode):
            for key, item in zip(saved.keys, saved.items, strict=True):
                if isinstance(item, ShardNode):
                    known[key] = self._shard(item, there.get(key), parameter, f"{path}[{key!r}]")
                elif key == "step" and on_host and isinstance(item, TensorNode) and item.device == "cpu":
                    self.source.verify(item)
                    known[key] = into_or_new(self.source, item, there.get(key), _HOST)
            load_state = self._dict(saved, live, path, known)
        else:
            load_state = self.check(saved, live, path)
        return lambda maker: load_state(maker.onto(recorded, parameter.device))

    def _options(self, node: Node, group: dict[str, Any], path: str) -> Load:
        options = {key: value for key, value in group.items() if key != "params"}
        return self.check(node, options, path)

    def _loader(self, node: LoaderNode, loader: DataLoader[Any], path: str) -> Load:
        generators = own_generators(loader)
        if len(generators) != len(node.generators) and self.with_attributes:
            return lambda _maker: loader  # it makes generators later: they come with its attributes
        if len(generators) != len(node.generators):
            raise RefusedSnapshotError(
                f"{path} has {len(generators)} generators here, but {len(node.generators)} were saved",
                _REMEDY,
            )
        pairs = zip(node.generators, generators, strict=True)
        loads = [self._generator(saved, live, f"{path}.generator") for saved, live in pairs]

        return lambda maker: _each(loads, maker, loader)

    def _generator(self, node: GeneratorNode, generator: Generator, path: str) -> Load:
        library, _ = generator_state(generator)
        if library != node.library:
            raise RefusedSnapshotError(
                f"{path} is a {library} generator here, a {node.library} one was saved", _REMEDY
            )
        load = Checker(self.source.strict).check(node.state, None, path)
        self._generators.append((generator, load, path))
        return lambda maker: _call(generator, partial(set_generator_state, generator), load(maker))


def _each(loads: Sequence[Load], maker: Maker, live: Any) -> Any:
    for load in loads:
        load(maker)
    return live


def _call(live: Any, load_state: Callable[[Any], object], state: Any) -> Any:
    load_state(state)
    return live


def _set_data(live: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    if live.layout in (torch.strided, torch.sparse_coo):
        live.data = made.detach()
    else:
        # Setting the data of a compressed tensor changes nothing, and says nothing.
        with torch.no_grad():
            live.resize_as_sparse_(made).copy_(made)
    return live


def _same_names(saved: Mapping[str, object], live: Mapping[str, object], path: str) -> None:
    for name in saved:
        if name not in live:
            raise RefusedSnapshotError(f"{path} has no {name!r} here, but it was saved", _REMEDY)
    for name in live:
        if name not in saved:
            raise RefusedSnapshotError(f"{path} has {name!r} here, but it was not saved", _REMEDY)
