"""Tagged JSON for everything that is not a tensor: what may be saved, and how it comes back.

A plain JSON ``null``, ``true``, ``false``, string, or integer up to 2**53 stands for itself. Anything
else is an array that begins with a tag. There are no JSON objects, no class is ever looked up by
name, and nothing is pickled; a value of another type is an error that names its path, until
`register_codec` teaches its type.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError, UsageError

from .tree_leaves import LEAVES, encode_leaf, named, stands_for_itself

DEPTH_LIMIT = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tree:
    """An encoded value: canonical tagged JSON."""

    data: bytes


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for a tensor in a tree.

    Attributes
    ----------
    ids
        Positions in the snapshot's list of tensors; one for an ordinary tensor.
    kind
        How to put the tensor together from them: ``strided``, ``sparse_coo``, ...
    extra
        What else that needs; any encodable value.
    """

    ids: tuple[int, ...]
    kind: str = "strided"
    extra: object = None


class _Codec(NamedTuple):
    type_: type
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


_codecs: dict[str, _Codec] = {}


def register_codec(
    name: str, type_: type[T], encode: Callable[[T], object], decode: Callable[[Any], T]
) -> None:
    """Teach trees one more type (exactly that type, not its subclasses).

    Parameters
    ----------
    name
        What stands in the snapshot; must stay the same for as long as snapshots shall be readable.
    type_
        The type.
    encode
        Gives an encodable value for an instance.
    decode
        Gives the instance back.

    Raises
    ------
    UsageError
        If name or type are taken by another codec.
    """
    taken = [n for n, codec in _codecs.items() if (n == name) != (codec.type_ is type_)]
    if taken:
        raise UsageError(f"the codec {name!r} for {type_.__name__} collides with {taken[0]!r}", "rename it")
    _codecs[name] = _Codec(type_, encode, decode)


TensorHook = Callable[[Any, str], TensorRef]


def encode(value: object, tensor: TensorHook | None = None, *, path: str = "") -> Tree:
    """Encode ``value``.

    Parameters
    ----------
    value
        The value; see docs/snapshot-format.md for the types.
    tensor
        Called with every torch tensor and its path (``model.layer.weight``); gives what stands for it.
    path
        Where the value is, for errors.

    Raises
    ------
    UsageError
        For a value of another type, or nested too deeply, or within itself; names the path.
    """
    return Tree(msgspec.json.encode(_Encoder(tensor).encode(value, path, 0)))


class _Encoder:
    """Carries the tensor hook through the recursion."""

    def __init__(self, tensor: TensorHook | None) -> None:
        self._tensor = tensor
        self._by_type = {codec.type_: (name, codec) for name, codec in _codecs.items()}
        torch = sys.modules.get("torch")
        self._torch_tensor: type | tuple[()] = torch.Tensor if torch else ()

    def encode(self, value: Any, path: str, depth: int) -> object:
        kind = type(value)
        if kind is TensorRef:
            return self._reference(value, path, depth)
        if stands_for_itself(value):
            return value
        if kind is str:
            return self._text(value, path)
        if kind in _SEQUENCES:
            depth = _below(path, depth)
            items = [
                item if stands_for_itself(item) else self.encode(item, _join(path, i), depth)
                for i, item in enumerate(value)
            ]
            return [_SEQUENCES[kind], *(sorted(items, key=repr) if kind in (set, frozenset) else items)]
        if kind is dict or kind is OrderedDict:
            return ["dict" if kind is dict else "odict", *self._pairs(value, path, _below(path, depth))]
        return self._other(value, path, depth)

    def _text(self, value: str, path: str) -> str:
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise UsageError(f"{named(path)} is not valid Unicode text", "save it as bytes") from None
        return value

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> list[list[object]]:
        return [
            [
                key if stands_for_itself(key) else self.encode(key, f"{_join(path, key)} (the key)", depth),
                item if stands_for_itself(item) else self.encode(item, _join(path, key), depth),
            ]
            for key, item in value.items()
        ]

    def _reference(self, value: TensorRef, path: str, depth: int) -> object:
        return ["tensor", value.kind, list(value.ids), self.encode(value.extra, path, depth + 1)]

    def _other(self, value: Any, path: str, depth: int) -> object:
        kind = type(value)
        if kind in self._by_type:
            name, codec = self._by_type[kind]
            return ["codec", name, self.encode(codec.encode(value), path, _below(path, depth))]
        if self._torch_tensor and isinstance(value, self._torch_tensor) and self._tensor is not None:
            return self._reference(self._tensor(value, path), path, depth)
        leaf = encode_leaf(value, path)
        if leaf is not None:
            return leaf
        raise UsageError(
            f"{named(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved",
            "give plain values, or teach its type with gpuslice.checkpoint.format.tree.register_codec",
        )


_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}


def _below(path: str, depth: int) -> int:
    """The depth of what is in a value at ``depth``."""
    if depth >= DEPTH_LIMIT:
        raise UsageError(f"{named(path)} is nested more than {DEPTH_LIMIT} deep", "flatten it")
    return depth + 1


def _join(path: str, key: object) -> str:
    part = key if isinstance(key, str) else repr(key)
    return f"{path}.{part}" if path else part


def decode(tree: Tree, tensor: Callable[[TensorRef], object] | None = None) -> Any:
    """Give the value back.

    Parameters
    ----------
    tree
        What `encode` gave, or a snapshot's.
    tensor
        Gives the tensor for a reference; without it the `TensorRef` itself is put in.

    Raises
    ------
    CorruptSnapshotError
        If the bytes are not what `encode` writes.
    RefusedSnapshotError
        If they name a codec that is not registered here.
    """
    try:
        value = msgspec.json.decode(tree.data)
        canonical = msgspec.json.encode(value) == tree.data
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CorruptSnapshotError(f"the tree is not JSON: {error}") from error
    if not canonical:
        raise CorruptSnapshotError("the tree is not canonical JSON")
    return _Decoder(tensor).decode(value, 0)


#: What of JSON means itself.
_THEMSELVES = {type(None), bool, str, int}


class _Decoder:
    """Carries the tensor hook through the recursion; what the hook raises passes through."""

    def __init__(self, tensor: Callable[[TensorRef], object] | None) -> None:
        self._tensor = tensor

    def decode(self, value: Any, depth: int) -> Any:
        if type(value) in _THEMSELVES:
            return value
        if not isinstance(value, list) or not value or depth > DEPTH_LIMIT + 1:
            raise CorruptSnapshotError(f"the tree has no tagged value in {str(value)[:40]}")
        tag, *rest = value
        if tag == "dict" or tag == "odict":
            return self._mapping(tag, rest, depth + 1)
        if tag == "tensor":
            return self._reference(rest, depth + 1)
        build: Callable[..., object]
        if tag == "codec":
            build, parts = self._codec(rest, depth + 1)
        elif not isinstance(tag, str) or tag not in _BUILDERS:
            raise CorruptSnapshotError(f"the tree has the unknown tag {str(tag)[:40]!r}")
        else:
            build = _BUILDERS[tag]
            if tag in _COLLECTIONS:
                parts = [
                    [item if type(item) in _THEMSELVES else self.decode(item, depth + 1) for item in rest]
                ]
            else:
                parts = rest
        try:
            return build(*parts)
        except (ValueError, TypeError, OverflowError, MemoryError) as error:
            raise CorruptSnapshotError(f"the tree has a malformed {tag}: {error}") from error

    def _mapping(self, tag: str, pairs: list[Any], depth: int) -> dict[Any, Any]:
        """In one loop: a snapshot of thousands of tensors has ten thousands of pairs, nearly all plain."""
        found: dict[Any, Any] = {} if tag == "dict" else OrderedDict()
        for pair in pairs:
            if type(pair) is not list or len(pair) != 2:
                raise CorruptSnapshotError("the tree has a malformed pair")
            key, item = pair
            if type(key) not in _THEMSELVES:
                key = self.decode(key, depth)
            if type(item) not in _THEMSELVES:
                item = self.decode(item, depth)
            try:
                found[key] = item
            except TypeError as error:
                raise CorruptSnapshotError(f"the tree has a malformed {tag}: {error}") from error
        return found

    def _reference(self, rest: list[Any], depth: int) -> object:
        match rest:
            case [str(kind), list(ids), extra] if all(type(i) is int and i >= 0 for i in ids):
                reference = TensorRef(tuple(ids), kind, self.decode(extra, depth))
                return reference if self._tensor is None else self._tensor(reference)
        raise CorruptSnapshotError("the tree has a malformed tensor")

    def _codec(self, rest: list[Any], depth: int) -> tuple[Callable[[Any], object], list[Any]]:
        match rest:
            case [str(name), inner] if name in _codecs:
                return _codecs[name].decode, [self.decode(inner, depth)]
            case [str(name), _]:
                raise RefusedSnapshotError(
                    f"the snapshot needs the codec {name!r}, which is not registered",
                    "call gpuslice.checkpoint.format.tree.register_codec before restoring",
                )
        raise CorruptSnapshotError("the tree has a malformed codec")


_COLLECTIONS: dict[str, Callable[[list[Any]], object]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_BUILDERS: dict[str, Callable[..., object]] = {**_COLLECTIONS, **LEAVES}
