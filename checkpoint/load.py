"""Nodes -> live objects, in two steps: everything is checked first, and only then anything is changed.

``Checker.check`` compares a node with the live object that it is meant for and returns a ``Load``: a
function that, given a ``Maker``, brings the object into the recorded state and returns the result (the
object itself where it is loaded in place, else a new value).
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from gpuslice.errors import RefusedSnapshotError

from .describe import (
    extra_states,
    is_holder,
    is_plain,
    is_stateful,
    named_tensors,
    unwrapped,
)
from .generators import Generator, generator_state, is_generator, own_generators, set_generator_state
from .nodes import (
    HOLDERS,
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
)
from .source import Maker, Source, same_bits

Load = Callable[[Maker], Any]
AnyTensorNode = TensorNode | SparseNode | QuantizedNode

#: Containers that do not look at what is put into them.
_INDIFFERENT = (type(None), dict, list, tuple, OrderedDict, defaultdict, deque)
_REMEDY = "restore into the objects of the script that wrote the snapshot"


class Checker:
    """Compares nodes with live objects; nothing is modified before a returned ``Load`` is called.

    Attributes
    ----------
    devices
        Where the tensors of each recorded device live now, as far as live tensors showed it.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.devices: dict[str, torch.device] = {}
        self._targets: dict[tuple[Any, ...], tuple[str, TensorNode]] = {}

    def check(self, node: Node, live: Any, path: str) -> Load:
        """Prepare to load ``node`` into ``live``.

        Raises
        ------
        RefusedSnapshotError
            If they do not fit, naming the path.
        CorruptSnapshotError
            If bytes that are needed are damaged.
        """
        if isinstance(node, HOLDERS) or is_holder(live):
            return self._holder(node, live, path)
        if isinstance(node, (TensorNode, SparseNode, QuantizedNode)):
            return self.loose_tensor(node, live)
        if isinstance(node, ArrayNode):
            return self._array(node, live)
        if isinstance(node, DictNode):
            return self._dict(node, live, path, {})
        if isinstance(node, (ListNode, TupleNode)):
            return self._sequence(node, live, path)
        return lambda _maker: refill(live, copy.deepcopy(node.value))

    def _dict(self, node: DictNode, live: Any, path: str, known_loads: Mapping[Any, Load]) -> Load:
        known = live if isinstance(live, Mapping) else {}
        loads = {
            key: known_loads.get(key) or self.check(item, known.get(key), f"{path}[{key!r}]")
            for key, item in zip(node.keys, node.items, strict=True)
        }
        return lambda maker: _refill(maker, live, {key: load(maker) for key, load in loads.items()})

    def _sequence(self, node: ListNode | TupleNode, live: Any, path: str) -> Load:
        known = list(live) if isinstance(live, (list, tuple, deque)) else []
        known += [None] * (len(node.items) - len(known))
        items = enumerate(zip(node.items, known, strict=False))
        loads = [self.check(item, part, f"{path}[{index}]") for index, (item, part) in items]
        kind = list if isinstance(node, ListNode) else tuple
        return lambda maker: _refill(maker, live, kind(load(maker) for load in loads))

    def _holder(self, node: Node, live: Any, path: str) -> Load:
        if isinstance(node, ModuleNode) and isinstance(live, torch.nn.Module):
            return self._module(node, unwrapped(live), path)
        if isinstance(node, OptimizerNode) and isinstance(live, torch.optim.Optimizer):
            return self._optimizer(node, live, path)
        if isinstance(node, LoaderNode) and isinstance(live, DataLoader):
            return self._loader(node, live, path)
        if isinstance(node, GeneratorNode) and is_generator(live):
            return self._generator(node, live, path)
        if isinstance(node, StatefulNode) and is_stateful(live):
            load = self.check(node.state, live.state_dict(), f"{path}.state_dict()")
            return lambda maker: _call(maker, live, live.load_state_dict, load(maker))
        kind = type(node).__struct_config__.tag
        raise RefusedSnapshotError(f"{path} is a {type(live).__name__} here, but a {kind} was saved", _REMEDY)

    def named_tensor(self, node: AnyTensorNode, live: torch.Tensor, path: str) -> Load:
        """A tensor that exists under a name: layout, shape and dtype must fit; loaded in place."""
        self._source.verify(node)
        if isinstance(node, TensorNode) and is_plain(live):
            spec = self._source.spec(node)
            if live.dtype is not getattr(torch, spec.dtype, None) or live.shape != spec.shape:
                found = f"{str(live.dtype).removeprefix('torch.')} {tuple(live.shape)}"
                raise RefusedSnapshotError(
                    f"{path} is {found} here, but {spec.dtype} {spec.shape} was saved", _REMEDY
                )
            self._same_target(node, live, path)
            self.devices.setdefault(node.device, live.device)
            return partial(self._load_plain, node, live)
        sparse = isinstance(node, SparseNode) and (f"torch.{node.layout}", node.shape) == (
            str(live.layout),
            tuple(live.shape),
        )
        if not sparse and not (isinstance(node, QuantizedNode) and live.is_quantized):
            raise RefusedSnapshotError(f"{path} has another layout or shape than was saved", _REMEDY)
        return lambda maker: _set_data(live, maker.make(node, live.device))

    def _load_plain(self, node: TensorNode, live: torch.Tensor, maker: Maker) -> torch.Tensor:
        self._source.copy_into(live, node)
        if not live.is_leaf:
            return live
        if live.requires_grad != node.requires_grad:
            live.requires_grad_(node.requires_grad)
        if isinstance(node.grad, TensorNode) and live.grad is not None and self._fits(node.grad, live.grad):
            self._source.copy_into(live.grad, node.grad)
        else:
            live.grad = None if node.grad is None else maker.make(node.grad, live.device)
        return live

    def _same_target(self, node: TensorNode, live: torch.Tensor, path: str) -> None:
        """Two names of one live memory need one value; the snapshot may hold two."""
        if live.data_ptr() == 0:
            return
        place = (live.data_ptr(), str(live.device), live.dtype, tuple(live.shape), live.stride())
        other, first = self._targets.setdefault(place, (path, node))
        if first is node or self._source.key(first) == self._source.key(node):
            return
        if not same_bits(self._source.view(first), self._source.view(node)):
            raise RefusedSnapshotError(
                f"{other} and {path} are one tensor here, but differed when saved", _REMEDY
            )

    def _fits(self, node: TensorNode, live: torch.Tensor) -> bool:
        spec = self._source.spec(node)
        return (
            is_plain(live)
            and live.dtype is getattr(torch, spec.dtype, None)
            and live.shape == spec.shape
            and live.stride() == spec.stride
        )

    def loose_tensor(self, node: AnyTensorNode, live: Any) -> Load:
        """A tensor inside a container: loaded in place if it fits what is there, else made anew."""
        self._source.verify(node)
        if not (isinstance(node, TensorNode) and isinstance(live, torch.Tensor) and live.is_leaf):
            return lambda maker: maker.make(node)
        if not self._fits(node, live):
            return lambda maker: maker.make(node)
        return partial(self._load_plain, node, live)

    def _array(self, node: ArrayNode, live: Any) -> Load:
        self._source.verify(node.data)

        def load(_maker: Maker) -> Any:
            values = self._source.view(node.data).clone().numpy()
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
            for load_tensor in loads:
                load_tensor(maker)
            for name, training in node.training.items():
                parts[name].training = training
            for name, load_extra in extras.items():
                _call(maker, extra[name], extra[name].set_extra_state, load_extra(maker))
            return module

        return load

    def _optimizer(self, node: OptimizerNode, optimizer: torch.optim.Optimizer, path: str) -> Load:
        """The state is written directly: ``load_state_dict`` would cast moments to the parameter's dtype."""
        groups = optimizer.param_groups
        shapes = [[list(parameter.shape) for parameter in group["params"]] for group in groups]
        if shapes != node.shapes or len(node.groups) != len(groups):
            raise RefusedSnapshotError(f"{path} has other parameter groups than were saved", _REMEDY)
        options = [
            self._options(saved, group, f"{path}.param_groups[{index}]")
            for index, (saved, group) in enumerate(zip(node.groups, groups, strict=True))
        ]
        owners = [(parameter, group) for group in groups for parameter in group["params"]]
        for number, device in node.devices.items():
            self.devices.setdefault(device, owners[number][0].device)
        kept = _own_state(optimizer)
        states: dict[Any, Load] = {key: self.check(saved, None, path) for key, saved in node.shared.items()}
        for number, saved in node.state.items():
            parameter, group = owners[number]
            live = kept.get(parameter)
            load_state = self._parameter_state(saved, group, live, f"{path}.state[{number}]")
            states[parameter] = partial(_beside, load_state, node.devices[number], parameter.device)

        def load(maker: Maker) -> torch.optim.Optimizer:
            for load_options in options:
                load_options(maker)
            loaded = {key: load_state(maker) for key, load_state in states.items()}
            optimizer.state.clear()
            optimizer.state.update(loaded)
            return optimizer

        return load

    def _options(self, node: Node, group: dict[str, Any], path: str) -> Load:
        options = {key: value for key, value in group.items() if key != "params"}
        load_options = self.check(node, options, path)

        def load(maker: Maker) -> None:
            loaded = load_options(maker)
            for key in set(group) - set(loaded) - {"params"}:
                del group[key]
            group.update(loaded)

        return load

    def _parameter_state(self, node: Node, group: Mapping[str, Any], live: Any, path: str) -> Load:
        """As torch places it: ``step`` stays on the host unless the update is fused or capturable."""
        on_device = group.get("capturable") or group.get("fused")
        if on_device or not isinstance(node, DictNode) or "step" not in node.keys:
            return self.check(node, live, path)
        step = node.items[node.keys.index("step")]
        there = live.get("step") if isinstance(live, Mapping) else None
        if not isinstance(step, TensorNode) or step.device != "cpu":
            return self.check(node, live, path)
        if isinstance(there, torch.Tensor) and there.is_cpu and there.is_leaf and self._fits(step, there):
            return self.check(node, live, path)
        self._source.verify(step)
        return self._dict(node, live, path, {"step": lambda maker: maker.make(step, torch.device("cpu"))})

    def _loader(self, node: LoaderNode, loader: DataLoader[Any], path: str) -> Load:
        generators = own_generators(loader)
        if len(generators) != len(node.generators):
            raise RefusedSnapshotError(
                f"{path} has {len(generators)} generators here, but {len(node.generators)} were saved",
                _REMEDY,
            )
        pairs = zip(node.generators, generators, strict=True)
        loads = [self._generator(saved, live, f"{path}.generator") for saved, live in pairs]

        def load(maker: Maker) -> DataLoader[Any]:
            for load_generator in loads:
                load_generator(maker)
            return loader

        return load

    def _generator(self, node: GeneratorNode, generator: Generator, path: str) -> Load:
        library, state = generator_state(generator)
        if library != node.library:
            raise RefusedSnapshotError(
                f"{path} is a {library} generator here, a {node.library} one was saved", _REMEDY
            )
        load = self.check(node.state, state, path)
        return lambda maker: _call(maker, generator, partial(set_generator_state, generator), load(maker))


def _own_state(optimizer: torch.optim.Optimizer) -> dict[Any, dict[Any, Any]]:
    """By parameter, the state that may be loaded in place: beside its parameter, and nobody else's memory."""
    tensors = [
        (parameter, name, value)
        for parameter, state in optimizer.state.items()
        if isinstance(parameter, torch.Tensor) and type(state) is dict
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    ]
    if any(value.layout is not torch.strided for _, _, value in tensors):
        return {}
    if len({value.untyped_storage()._cdata for _, _, value in tensors}) < len(tensors):
        return {}
    elsewhere = {id(p) for p, name, value in tensors if name != "step" and value.device != p.device}
    return {
        parameter: state
        for parameter, state in optimizer.state.items()
        if type(state) is dict and id(parameter) not in elsewhere
    }


def refill(live: Any, value: Any) -> Any:
    """Put a loaded container into the live one, so that its type and everybody's references stay."""
    if isinstance(live, MutableMapping) and isinstance(value, dict):
        live.clear()
        live.update(value)
        return live
    if isinstance(live, MutableSequence) and isinstance(value, list):
        live.clear()
        live.extend(value)
        return live
    if isinstance(live, tuple) and isinstance(value, tuple) and hasattr(live, "_fields"):
        return type(live)(*value)
    return value


def _beside(load: Load, recorded: str, device: torch.device, maker: Maker) -> Any:
    """Load what belongs to a parameter that was on ``recorded`` and is on ``device`` now."""
    return load(maker.onto(recorded, device))


def _call(maker: Maker, live: Any, load_state: Callable[[Any], object], state: Any) -> Any:
    maker.settle()
    load_state(state)
    return live


def _refill(maker: Maker, live: Any, value: Any) -> Any:
    """`refill`; a container of the user's own may look at what it is given."""
    if type(live) not in _INDIFFERENT:
        maker.settle()
    return refill(live, value)


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
