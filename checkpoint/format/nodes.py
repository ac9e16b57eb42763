"""The nodes of a snapshot's tree: one small tagged struct per kind of object.

Tensors are in the tree by index only; their bytes are the snapshot's storages. A ``ValueNode`` holds what
``tree.py`` can encode (numbers, text, bytes and flat containers of them). There may be thousands of nodes, so
msgspec converts them to JSON and back without a step in Python for each.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec

from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError, UsageError

from . import tree as trees


class _Node(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all nodes."""


class ValueNode(_Node, frozen=True, tag="value"):
    """A scalar, or a list, tuple or dict of scalars."""

    data: msgspec.Raw

    @classmethod
    def of(cls, value: object, path: str) -> ValueNode:
        """Return the node of a plain value. Raise ``UsageError``, naming the path, if it cannot be saved."""
        return cls(msgspec.Raw(trees.encode(value, path=path)))

    def value(self) -> Any:
        """Return the value, a new object at each call."""
        return trees.decode(bytes(self.data))


class ListNode(_Node, frozen=True, tag="list"):
    """A list of any items."""

    items: list[Node]


class TupleNode(_Node, frozen=True, tag="tuple"):
    """A tuple of any items."""

    items: list[Node]


class DictNode(_Node, frozen=True, tag="dict"):
    """A dict of any items, in order. Its keys are a value: a tuple of scalars."""

    names: msgspec.Raw
    items: list[Node]

    @classmethod
    def of(cls, items: Mapping[Any, Node], path: str) -> DictNode:
        """Return the node of a dict. Raise ``UsageError``, naming the path, if its keys cannot be saved."""
        return cls(ValueNode.of(tuple(items), path).data, list(items.values()))

    def __post_init__(self) -> None:
        if len({*self.keys}) != len(self.items):
            raise ValueError("a dict needs one item for each of its keys")

    @property
    def keys(self) -> tuple[Any, ...]:
        """The keys, in the order of the items."""
        return _keys(bytes(self.names))


class KindNode(_Node, frozen=True, tag="kind"):
    """A container or data object that is no plain list, tuple or dict: a deque, a counter, an enum member.

    ``name``: its class, "" for the kind's own; ``data``: its items, fields or member; ``detail``: the
    argument it was made with (a deque's maximum, a default factory); ``attributes``: those of an object whose
    class is derived from a container.
    """

    kind: str
    name: str
    data: Node
    detail: ValueNode | None = None
    attributes: Node | None = None


class TensorNode(_Node, frozen=True, tag="tensor"):
    """A strided tensor: index into the snapshot's tensors, the torch device it was on, its gradient."""

    index: int
    device: str
    requires_grad: bool = False
    grad: TensorNode | SparseNode | None = None


class SparseNode(_Node, frozen=True, tag="sparse"):
    """A sparse tensor: (indices, values), or (compressed, plain, values) for the compressed layouts."""

    layout: str
    shape: tuple[int, ...]
    parts: list[TensorNode]
    coalesced: bool
    requires_grad: bool = False


class QuantizedNode(_Node, frozen=True, tag="quantized"):
    """A quantized tensor: integers, scales, zero points; ``axis`` is None for one scale per tensor."""

    parts: list[TensorNode]
    axis: int | None


class ShardNode(_Node, frozen=True, tag="shard"):
    """A rank's part of a DTensor: shape of the whole, placements, shape of the mesh, this rank's position."""

    local: TensorNode
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    requires_grad: bool = False
    grad: ShardNode | None = None


class FlattenedNode(_Node, frozen=True, tag="flattened"):
    """A tensor of a class of its own: class name, result of ``__tensor_flatten__``, outer shape.

    A class that only adds methods has one part without a name: its memory.
    """

    kind: str
    context: ValueNode
    parts: dict[str, AnyTensorNode]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    grad: AnyTensorNode | None = None


class UnsavedNode(_Node, frozen=True, tag="unsaved"):
    """A tensor that could not be saved, and why."""

    reason: str


AnyTensorNode = TensorNode | SparseNode | QuantizedNode | ShardNode | FlattenedNode | UnsavedNode


class ArrayNode(_Node, frozen=True, tag="array"):
    """A NumPy array."""

    data: TensorNode


class ModuleNode(_Node, frozen=True, tag="module"):
    """A ``torch.nn.Module``: all parameters and buffers, by qualified name.

    ``buckets``: for each ``DistributedDataParallel`` the numbers of its parameters, by gradient bucket.
    """

    tensors: dict[str, AnyTensorNode]
    training: dict[str, bool]
    extra: dict[str, Node]
    buckets: dict[str, list[list[int]]] = {}


class OptimizerNode(_Node, frozen=True, tag="optimizer"):
    """A ``torch.optim.Optimizer``: group options, shapes of the parameters, state by parameter number.

    ``names``: for each group the names of its parameters, if attached modules have them.
    """

    groups: list[DictNode | ValueNode]
    shapes: list[list[list[int]]]
    state: dict[int, Node]
    shared: dict[str, Node]
    devices: dict[int, str]
    names: list[list[str]] = []

    def __post_init__(self) -> None:
        parameters = set(range(sum(map(len, self.shapes))))
        if set(self.devices) != parameters or not set(self.state) <= parameters:
            raise ValueError("an optimizer has state of parameters that it does not have")


class StatefulNode(_Node, frozen=True, tag="stateful"):
    """The result of an object's ``state_dict()``."""

    state: Node


class GeneratorNode(_Node, frozen=True, tag="generator"):
    """A random number generator: its library, and its state."""

    library: str
    state: Node


class LoaderNode(_Node, frozen=True, tag="loader"):
    """A data loader: the generators of its samplers, its dataset and itself. The job keeps its position."""

    generators: list[GeneratorNode]


class RefNode(_Node, frozen=True, tag="ref"):
    """A reference, by name, to an object that a job has when it attaches."""

    path: str


class SharedNode(_Node, frozen=True, tag="shared"):
    """An object to which several refer, by a number. ``data`` is None after its first description."""

    number: int
    data: Node | None


class ChangeNode(_Node, frozen=True, tag="change"):
    """What has changed in an object since it was attached.

    ``kind``: its class; ``slots``: attributes that were set; ``gone``: attributes that it no longer has;
    ``content``: the content of a container, tensor or array.
    """

    path: str
    kind: str
    slots: dict[str, Node]
    gone: list[str]
    content: Node | None


class AttributesNode(_Node, frozen=True, tag="attributes"):
    """The attributes of attached objects beside their own state.

    ``holders``: modules, optimizers and generators among them, by name; ``changes``: for all other objects.
    """

    holders: dict[str, Node]
    changes: list[ChangeNode]


Node = (
    ValueNode
    | ListNode
    | TupleNode
    | DictNode
    | KindNode
    | AnyTensorNode
    | ArrayNode
    | ModuleNode
    | OptimizerNode
    | StatefulNode
    | GeneratorNode
    | LoaderNode
    | RefNode
    | SharedNode
    | AttributesNode
)

#: Nodes whose objects are loaded in place; all others are values.
HOLDERS = (ModuleNode, OptimizerNode, StatefulNode, GeneratorNode, LoaderNode)


_decoder = msgspec.json.Decoder(dict[str, Node])


@functools.lru_cache(maxsize=256)  # an optimizer keeps the same things of all of its parameters
def _keys(data: bytes) -> tuple[Any, ...]:
    keys = trees.decode(data)
    if not isinstance(keys, tuple):
        raise ValueError("a dict's keys are no tuple")
    return keys


def encode(nodes: Mapping[str, Node]) -> bytes:
    """Return named nodes as a snapshot's tree, in its only legal form.

    Raises
    ------
    UsageError
        If some name is not text that a file can hold.
    """
    try:
        return msgspec.json.encode(nodes)
    except UnicodeEncodeError as error:
        raise UsageError(f"{error.object!r} is not valid Unicode text", "rename it") from None


def decode(tree: bytes) -> dict[str, Node]:
    """Return the named nodes of a snapshot's tree.

    Raises
    ------
    RefusedSnapshotError
        If the snapshot holds no named state.
    CorruptSnapshotError
        If it is not in the form that `encode` gives it.
    """
    try:
        nodes = _decoder.decode(tree)
        canonical = encode(nodes) == tree
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise RefusedSnapshotError(
            f"the snapshot holds no named state: {error}", "it was not written by an attached job"
        ) from error
    if not canonical:
        raise CorruptSnapshotError("the named state is not in its canonical form")
    return nodes
