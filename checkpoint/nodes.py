"""What a snapshot's tree holds for named objects: one small tagged struct per kind of object.

Tensors are in the tree by index only; their bytes are the snapshot's storages. ``Value`` carries
what the tree itself can encode (numbers, text, bytes and flat containers of them).
"""

from __future__ import annotations

from typing import Any

import msgspec

from gpuslice.errors import RefusedSnapshotError


class _Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of all nodes."""


class ValueNode(_Node, frozen=True, tag="value"):
    """A scalar, or a list, tuple or dict of scalars."""

    value: Any


class ListNode(_Node, frozen=True, tag="list"):
    """A list of anything."""

    items: list[Node]


class TupleNode(_Node, frozen=True, tag="tuple"):
    """A tuple of anything."""

    items: list[Node]


class DictNode(_Node, frozen=True, tag="dict"):
    """A dict of anything, in its order; keys are scalars."""

    keys: list[Any]
    items: list[Node]

    def __post_init__(self) -> None:
        if len({*self.keys}) != len(self.items):
            raise ValueError("a dict needs one item for each of its keys")


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


class ArrayNode(_Node, frozen=True, tag="array"):
    """A NumPy array."""

    data: TensorNode


class ModuleNode(_Node, frozen=True, tag="module"):
    """A ``torch.nn.Module``: parameters and buffers, the persistent or not, by qualified name."""

    tensors: dict[str, TensorNode | SparseNode | QuantizedNode]
    training: dict[str, bool]
    extra: dict[str, Node]


class OptimizerNode(_Node, frozen=True, tag="optimizer"):
    """A ``torch.optim.Optimizer``: group options, shapes of the parameters, state by parameter number."""

    groups: list[DictNode | ValueNode]
    shapes: list[list[list[int]]]
    state: dict[int, Node]
    shared: dict[str, Node]
    devices: dict[int, str]

    def __post_init__(self) -> None:
        parameters = set(range(sum(map(len, self.shapes))))
        if set(self.devices) != parameters or not set(self.state) <= parameters:
            raise ValueError("an optimizer has state of parameters that it does not have")


class StatefulNode(_Node, frozen=True, tag="stateful"):
    """What an object's ``state_dict()`` returned."""

    state: Node


class GeneratorNode(_Node, frozen=True, tag="generator"):
    """A random number generator: which library's, and its state."""

    library: str
    state: Node


class LoaderNode(_Node, frozen=True, tag="loader"):
    """A data loader: the generators that it, its samplers and its dataset own. Its position is the job's."""

    generators: list[GeneratorNode]


Node = (
    ValueNode
    | ListNode
    | TupleNode
    | DictNode
    | TensorNode
    | SparseNode
    | QuantizedNode
    | ArrayNode
    | ModuleNode
    | OptimizerNode
    | StatefulNode
    | GeneratorNode
    | LoaderNode
)

#: The kinds whose objects are loaded in place; everything else is a value.
HOLDERS = (ModuleNode, OptimizerNode, StatefulNode, GeneratorNode, LoaderNode)


def to_tree(node: Any) -> Any:
    """Builtins only, for the snapshot's tree; a ``ValueNode``'s value goes in as it is."""
    if isinstance(node, TensorNode):
        return _short(node)
    if isinstance(node, ValueNode):
        return {"kind": "value", "value": node.value}
    if isinstance(node, _Node):
        fields = {name: to_tree(getattr(node, name)) for name in node.__struct_fields__}
        return {"kind": node.__struct_config__.tag, **fields}
    if isinstance(node, list):
        return [to_tree(item) for item in node]
    if isinstance(node, dict):
        return {key: to_tree(item) for key, item in node.items()}
    return node


def _short(node: TensorNode) -> dict[str, Any]:
    """Without what a reader takes for granted: most nodes are tensors."""
    fields: dict[str, Any] = {"kind": "tensor", "index": node.index, "device": node.device}
    if node.requires_grad:
        fields["requires_grad"] = True
    if node.grad is not None:
        fields["grad"] = to_tree(node.grad)
    return fields


def from_tree(tree: object) -> dict[str, Node]:
    """The named nodes of a snapshot's tree.

    Raises
    ------
    RefusedSnapshotError
        If the snapshot holds something else than named state.
    """
    try:
        return msgspec.convert(tree, dict[str, Node])
    except (msgspec.ValidationError, RecursionError) as error:
        raise RefusedSnapshotError(
            f"the snapshot holds no named state: {error}", "it was not written by an attached job"
        ) from error
