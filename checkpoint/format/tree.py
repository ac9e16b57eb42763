"""Tagged JSON for everything that is not a tensor: what may be saved, and how it comes back.

A plain JSON ``null``, ``true``, ``false``, string, or integer up to 2**53 stands for itself. Anything
else is an array that begins with a tag. There are no JSON objects, no class is ever looked up by
name, and nothing is pickled; a value of another type is an error that names its path.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from gpuslice.errors import CorruptSnapshotError, UsageError

DEPTH_LIMIT = 64
_EXACT_INT = 2**53
#: Kinds of NumPy's scalars: no objects.
_SCALAR_KINDS = "biufcSUmM"


@dataclass(frozen=True, slots=True)
class Tree:
    """An encoded value: canonical tagged JSON."""

    data: bytes


def encode(value: object, *, path: str = "") -> Tree:
    """Encode ``value``.

    Parameters
    ----------
    value
        The value; see docs/snapshot-format.md for the types.
    path
        Where the value is, for errors.

    Raises
    ------
    UsageError
        For a value of another type, or nested too deeply, or within itself; names the path.
    """
    return Tree(msgspec.json.encode(_encode(value, path, 0)))


def _encode(value: Any, path: str, depth: int) -> object:
    kind = type(value)
    if _stands_for_itself(value):
        return value
    if kind is str:
        return _text(value, path)
    if kind in (list, tuple):
        depth = _below(path, depth)
        return [kind.__name__, *(_encode(item, _join(path, at), depth) for at, item in enumerate(value))]
    if kind is dict:
        depth = _below(path, depth)
        return [
            "dict",
            *(
                [_encode(key, f"{_join(path, key)} (the key)", depth), _encode(item, _join(path, key), depth)]
                for key, item in value.items()
            ),
        ]
    leaf = _encode_leaf(value, path)
    if leaf is None:
        problem = f"{_named(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved"
        raise UsageError(problem, "give plain values")
    return leaf


def _stands_for_itself(value: Any) -> bool:
    """Whether JSON has the value as it is. Most have, and need neither a path nor a tag."""
    kind = type(value)
    if kind is str:
        return value.isascii()  # type: ignore[no-any-return]
    return value is None or kind is bool or (kind is int and -_EXACT_INT <= value <= _EXACT_INT)


def _encode_leaf(value: Any, path: str) -> list[object] | None:
    """Encode a value that holds no others; ``None`` for any other value."""
    kind = type(value)
    if kind in _ENCODERS:
        return _ENCODERS[kind](value)
    if isinstance(value, np.generic):
        return _encode_scalar(value, path)
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if kind is torch.Size:
        return ["size", *value]
    if kind is torch.dtype:
        return ["dtype", str(value).removeprefix("torch.")]
    if kind is torch.device:
        return ["device", str(value)]
    return None


def _encode_scalar(value: np.generic, path: str) -> list[object]:
    if value.dtype.kind not in _SCALAR_KINDS:
        raise UsageError(f"{_named(path)} is a scalar of {value.dtype}, which cannot be saved", "convert it")
    return ["scalar", value.dtype.str, [], base64.b64encode(value.tobytes()).decode()]


_ENCODERS: dict[type, Callable[[Any], list[object]]] = {
    int: lambda value: ["int", hex(value)],
    float: lambda value: ["float", value.hex()],
    complex: lambda value: ["complex", value.real.hex(), value.imag.hex()],
    bytes: lambda value: ["bytes", base64.b64encode(value).decode()],
}


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{_named(path)} is not valid Unicode text", "save it as bytes") from None
    return value


def _below(path: str, depth: int) -> int:
    """The depth of what is in a value at ``depth``."""
    if depth >= DEPTH_LIMIT:
        raise UsageError(f"{_named(path)} is nested more than {DEPTH_LIMIT} deep", "flatten it")
    return depth + 1


def _join(path: str, key: object) -> str:
    part = key if isinstance(key, str) else repr(key)
    return f"{path}.{part}" if path else part


def _named(path: str) -> str:
    """What an error calls the value at ``path``."""
    return path or "the value"


def decode(tree: Tree) -> Any:
    """Give the value back.

    Raises
    ------
    CorruptSnapshotError
        If the bytes are not what `encode` writes.
    """
    try:
        value = msgspec.json.decode(tree.data)
        canonical = msgspec.json.encode(value) == tree.data
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CorruptSnapshotError(f"the tree is not JSON: {error}") from error
    if not canonical:
        raise CorruptSnapshotError("the tree is not canonical JSON")
    return _decode(value, 0)


def _decode(value: Any, depth: int) -> Any:
    if value is None or type(value) in (bool, str, int):
        return value
    if not isinstance(value, list) or not value or depth > DEPTH_LIMIT + 1:
        raise CorruptSnapshotError(f"the tree has no tagged value in {str(value)[:40]}")
    tag, *rest = value
    if not isinstance(tag, str) or tag not in _BUILDERS:
        raise CorruptSnapshotError(f"the tree has the unknown tag {str(tag)[:40]!r}")
    try:
        if tag in _LEAVES:
            return _LEAVES[tag](*rest)
        part = _pair if tag == "dict" else _decode
        return _BUILDERS[tag](part(item, depth + 1) for item in rest)
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise CorruptSnapshotError(f"the tree has a malformed {tag}: {error}") from error


def _pair(pair: Any, depth: int) -> tuple[Any, Any]:
    if type(pair) is not list or len(pair) != 2:
        raise CorruptSnapshotError("the tree has a malformed pair")
    return _decode(pair[0], depth), _decode(pair[1], depth)


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


def _decode_scalar(dtype: str, shape: list[int], data: str) -> Any:
    kind = np.dtype(dtype)
    raw = base64.b64decode(data, validate=True)
    if kind.kind not in _SCALAR_KINDS or shape != [] or kind.itemsize != len(raw):
        raise ValueError("a scalar's bytes do not fit its type")
    return np.frombuffer(raw, kind)[0] if raw else np.empty((), kind)[()]


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


#: By tag, what makes the value from what follows it; malformed parts are a ``ValueError`` or ``TypeError``.
_LEAVES: dict[str, Callable[..., object]] = {
    "int": _decode_int,
    "float": _decode_float,
    "complex": lambda real, imag: complex(_decode_float(real), _decode_float(imag)),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "scalar": _decode_scalar,
    "size": _decode_size,
    "dtype": _decode_dtype,
    "device": _decode_device,
}
_BUILDERS: dict[str, Callable[..., object]] = {"list": list, "tuple": tuple, "dict": dict, **_LEAVES}
