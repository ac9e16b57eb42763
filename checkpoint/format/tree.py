"""Tagged JSON for values that are no tensors: which values can be saved, and how they are restored.

A plain JSON ``null``, ``true``, ``false``, string, or integer up to 2**53 stands for itself. All other values
are arrays that begin with a tag. There are no JSON objects, no class is looked up by name, and nothing is
pickled. A value has one form: text that `encode` would not write is not decoded.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from gpuslice.errors import CorruptSnapshotError, UsageError

DEPTH_LIMIT = 64
_EXACT_INT = 2**53
#: Kinds of NumPy's scalars that can be saved: all but objects.
_SCALAR_KINDS = "biufcSUmM"
#: Exceptions that a builder raises for malformed parts, or the encoder for what was built.
_MALFORMED = (
    *(ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError),
    *(SyntaxError, UsageError, msgspec.DecodeError),
)


def encode(value: object, *, path: str = "the value") -> bytes:
    """Encode ``value`` as canonical tagged JSON.

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
    try:
        return msgspec.json.encode(_encode(value, DEPTH_LIMIT))
    except (TypeError, ValueError) as error:  # also of text that is not valid Unicode
        raise UsageError(f"{path} cannot be saved: {error}", "give plain values") from None


def _encode(value: Any, levels: int) -> object:
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is int and abs(value) <= _EXACT_INT):
        return value
    if kind in (list, tuple, dict):
        if levels == 0:
            raise ValueError(f"it is nested more than {DEPTH_LIMIT} deep")
        if kind is dict:
            return ["dict", *([_encode(part, levels - 1) for part in pair] for pair in value.items())]
        return [kind.__name__, *(_encode(item, levels - 1) for item in value)]
    if isinstance(value, np.generic) and value.dtype.kind in _SCALAR_KINDS:
        return ["scalar", value.dtype.str, [], base64.b64encode(value.tobytes()).decode()]
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name not in _LEAVES:
        raise TypeError(f"a {name} is no plain value")
    return _LEAVES[name](value)


#: Encoders by the name of the type, so that torch need not be imported.
_LEAVES: dict[str, Callable[[Any], list[object]]] = {
    "builtins.int": lambda value: ["int", hex(value)],
    "builtins.float": lambda value: ["float", value.hex()],
    "builtins.complex": lambda value: ["complex", value.real.hex(), value.imag.hex()],
    "builtins.bytes": lambda value: ["bytes", base64.b64encode(value).decode()],
    "torch.Size": lambda value: ["size", *value],
    "torch.dtype": lambda value: ["dtype", str(value).removeprefix("torch.")],
    "torch.device": lambda value: ["device", str(value)],
}


def decode(tree: bytes) -> Any:
    """Return the value that the bytes encode.

    Raises
    ------
    CorruptSnapshotError
        If `encode` would not have written these bytes.
    """
    try:
        value = _decode(msgspec.json.decode(tree))
        canonical = encode(value) == tree
    except _MALFORMED as error:
        raise CorruptSnapshotError(f"the tree holds no value: {error}") from error
    if not canonical:
        raise CorruptSnapshotError("the tree is not in its canonical form")
    return value


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    tag, *parts = value
    return _BUILDERS[tag](*parts)


def _torch() -> Any:
    import torch

    return torch


#: Builders by tag: each makes a value from the parts that follow the tag.
_BUILDERS: dict[str, Callable[..., object]] = {
    "list": lambda *items: [_decode(item) for item in items],
    "tuple": lambda *items: tuple(map(_decode, items)),
    "dict": lambda *pairs: {_decode(key): _decode(item) for key, item in pairs},
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "bytes": lambda data: base64.b64decode(data),
    "scalar": lambda dtype, _, data: np.frombuffer(base64.b64decode(data), dtype)[0],
    "size": lambda *sizes: _torch().Size(sizes),
    "dtype": lambda name: vars(_torch())[name],
    "device": lambda name: _torch().device(name),
}
