"""The leaves of a tree: numbers, bytes, arrays and torch's small types, as tagged arrays and back."""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuslice.errors import UsageError

_EXACT_INT = 2**53
_ARRAY_KINDS = "biufcSUmM"


def stands_for_itself(value: Any) -> bool:
    """Whether JSON has the value as it is. Most have, and need neither a path nor a tag."""
    kind = type(value)
    if kind is str:
        return value.isascii()  # type: ignore[no-any-return]
    return value is None or kind is bool or (kind is int and -_EXACT_INT <= value <= _EXACT_INT)


def named(path: str) -> str:
    """What an error calls the value at ``path``."""
    return path or "the value"


def encode_leaf(value: Any, path: str) -> list[object] | None:
    """Encode a value that holds no others; ``None`` for any other value.

    Raises
    ------
    UsageError
        For an array whose elements are no plain numbers, times or texts; names the path.
    """
    kind = type(value)
    if kind in _ENCODERS:
        return _ENCODERS[kind](value)
    if kind is np.ndarray or isinstance(value, np.generic):
        return _encode_numpy(value, path)
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


def _encode_bytes(value: bytes | bytearray) -> list[object]:
    return [type(value).__name__, base64.b64encode(value).decode()]


def _encode_numpy(value: Any, path: str) -> list[object]:
    array = np.asarray(value)
    if array.dtype.kind not in _ARRAY_KINDS or array.dtype.hasobject:
        raise UsageError(f"{named(path)} is an array of {array.dtype}, which cannot be saved", "convert it")
    tag = "scalar" if isinstance(value, np.generic) else "array"
    data = base64.b64encode(array.tobytes()).decode()
    return [tag, array.dtype.str, list(array.shape), data]


_ENCODERS: dict[type, Callable[[Any], list[object]]] = {
    int: lambda value: ["int", hex(value)],
    float: lambda value: ["float", value.hex()],
    complex: lambda value: ["complex", value.real.hex(), value.imag.hex()],
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
}


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


def _decode_array(dtype: str, shape: list[int], data: str) -> Any:
    kind = np.dtype(dtype)
    raw = base64.b64decode(data, validate=True)
    if kind.kind not in _ARRAY_KINDS or kind.hasobject or math.prod(shape) * kind.itemsize != len(raw):
        raise ValueError("an array's bytes do not fit its shape")
    return np.frombuffer(raw, kind).reshape(shape).copy() if raw else np.empty(shape, kind)


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
LEAVES: dict[str, Callable[..., object]] = {
    "int": _decode_int,
    "float": _decode_float,
    "complex": lambda real, imag: complex(_decode_float(real), _decode_float(imag)),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "scalar": lambda *parts: _decode_array(*parts)[()],
    "array": _decode_array,
    "size": _decode_size,
    "dtype": _decode_dtype,
    "device": _decode_device,
}
