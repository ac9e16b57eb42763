"""Tagged JSON for everything that is not a tensor: what may be saved, and how it comes back.

A plain JSON ``null``, ``true``, ``false``, string, or integer up to 2**53 stands for itself. Anything
else is an array that begins with a tag. There are no JSON objects, no class is ever looked up by
name, and nothing is pickled; a value of another type is an error that names its path, until
`register_codec` teaches its type.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError, UsageError

DEPTH_LIMIT = 64
_EXACT_INT = 2**53
_ARRAY_KINDS = "biufcSUmM"

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
        if _stands_for_itself(value):
            return value
        if kind is str:
            return self._text(value, path)
        if kind is int:
            return ["int", hex(value)]
        if kind is float:
            return ["float", value.hex()]
        if depth >= DEPTH_LIMIT:
            raise UsageError(f"{_name(path)} is nested more than {DEPTH_LIMIT} deep", "flatten it")
        if kind in _SEQUENCES:
            items = [
                item if _stands_for_itself(item) else self.encode(item, _join(path, i), depth + 1)
                for i, item in enumerate(value)
            ]
            return [_SEQUENCES[kind], *(sorted(items, key=repr) if kind in (set, frozenset) else items)]
        if kind is dict or kind is OrderedDict:
            return ["dict" if kind is dict else "odict", *self._pairs(value, path, depth + 1)]
        return self._other(value, path, depth)

    def _text(self, value: str, path: str) -> str:
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise UsageError(f"{_name(path)} is not valid Unicode text", "save it as bytes") from None
        return value

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> list[list[object]]:
        return [
            [
                key if _stands_for_itself(key) else self.encode(key, f"{_join(path, key)} (the key)", depth),
                item if _stands_for_itself(item) else self.encode(item, _join(path, key), depth),
            ]
            for key, item in value.items()
        ]

    def _reference(self, value: TensorRef, path: str, depth: int) -> object:
        return ["tensor", value.kind, list(value.ids), self.encode(value.extra, path, depth + 1)]

    def _other(self, value: Any, path: str, depth: int) -> object:
        kind = type(value)
        if kind in self._by_type:
            name, codec = self._by_type[kind]
            return ["codec", name, self.encode(codec.encode(value), path, depth + 1)]
        if kind is bytes or kind is bytearray:
            return [kind.__name__, base64.b64encode(value).decode()]
        if kind is complex:
            return ["complex", value.real.hex(), value.imag.hex()]
        if isinstance(value, np.generic) or kind is np.ndarray:
            return _encode_numpy(value, path)
        if self._torch_tensor and isinstance(value, self._torch_tensor) and self._tensor is not None:
            return self._reference(self._tensor(value, path), path, depth)
        tagged = _encode_torch(value)
        if tagged is not None:
            return tagged
        raise UsageError(
            f"{_name(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved",
            "give plain values, or teach its type with gpuslice.checkpoint.tree.register_codec",
        )


def _stands_for_itself(value: Any) -> bool:
    """Whether JSON has the value as it is. Most have, and need neither a path nor a tag."""
    kind = type(value)
    if kind is str:
        return value.isascii()  # type: ignore[no-any-return]
    return value is None or kind is bool or (kind is int and -_EXACT_INT <= value <= _EXACT_INT)


_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}


def _name(path: str) -> str:
    return path or "the value"


def _join(path: str, key: object) -> str:
    part = key if isinstance(key, str) else repr(key)
    return f"{path}.{part}" if path else part


def _encode_numpy(value: Any, path: str) -> list[object]:
    array = np.asarray(value)
    if array.dtype.kind not in _ARRAY_KINDS or array.dtype.hasobject:
        raise UsageError(f"{_name(path)} is an array of {array.dtype}, which cannot be saved", "convert it")
    tag = "scalar" if isinstance(value, np.generic) else "array"
    data = base64.b64encode(array.tobytes()).decode()
    return [tag, array.dtype.str, list(array.shape), data]


def _encode_torch(value: Any) -> list[object] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if type(value) is torch.Size:
        return ["size", *value]
    if type(value) is torch.dtype:
        return ["dtype", str(value).removeprefix("torch.")]
    if type(value) is torch.device:
        return ["device", str(value)]
    return None


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
                    "call gpuslice.checkpoint.tree.register_codec before restoring",
                )
        raise CorruptSnapshotError("the tree has a malformed codec")


def _decode_float(text: str) -> float:
    value = float.fromhex(text)
    if value.hex() != text:
        raise ValueError(f"{text} is not the hexadecimal form of a float")
    return value


def _decode_int(text: str) -> int:
    value = int(text, 16)
    if hex(value) != text or -_EXACT_INT <= value <= _EXACT_INT:
        raise ValueError(f"{text} is not the form of a large integer")
    return value


def _decode_numpy(tag: str) -> Callable[[str, list[int], str], Any]:
    def decode_array(dtype: str, shape: list[int], data: str) -> Any:
        kind = np.dtype(dtype)
        raw = base64.b64decode(data, validate=True)
        if kind.kind not in _ARRAY_KINDS or kind.hasobject or math.prod(shape) * kind.itemsize != len(raw):
            raise ValueError("an array's bytes do not fit its shape")
        array = np.frombuffer(raw, kind).reshape(shape) if raw else np.empty(shape, kind)
        return array[()] if tag == "scalar" else array.copy()

    return decode_array


def _decode_dtype(name: str) -> object:
    import torch

    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return value


def _decode_device(name: str) -> object:
    import torch

    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device") from error


def _decode_size(*sizes: int) -> object:
    import torch

    return torch.Size(sizes)


_COLLECTIONS: dict[str, Callable[[list[Any]], object]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_LEAVES: dict[str, Callable[..., object]] = {
    "int": _decode_int,
    "float": _decode_float,
    "complex": lambda real, imag: complex(_decode_float(real), _decode_float(imag)),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "scalar": _decode_numpy("scalar"),
    "array": _decode_numpy("array"),
    "size": _decode_size,
    "dtype": _decode_dtype,
    "device": _decode_device,
}
_BUILDERS: dict[str, Callable[..., object]] = {**_COLLECTIONS, **_LEAVES}
