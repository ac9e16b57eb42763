"""Arrays of other libraries over a GPU's memory: all objects with ``__cuda_array_interface__``.

Such an array (of CuPy, Numba, JAX) stores the address of memory that may be a tensor's, and would not learn
of a new address.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

_INTERFACE = "__cuda_array_interface__"
#: The types that were found last, and how many modules and classes there were then.
_known: tuple[tuple[int, int], tuple[type, ...]] = (0, 0), ()


def kinds() -> tuple[type, ...]:
    """Return the types with ``__cuda_array_interface__``, but torch's and those without weak references."""
    global _known
    stand = len(sys.modules), len(object.__subclasses__())
    if _known[0] != stand:
        _known = stand, tuple(_defining(object, set()))
    return _known[1]


def _defining(kind: type, seen: set[type]) -> Iterator[type]:
    """Yield the topmost types below ``kind`` that define the interface. Their subclasses inherit it."""
    below: list[type] = type.__subclasses__(kind)
    for derived in below:
        if derived in seen or derived is torch.Tensor:
            continue
        seen.add(derived)
        if _INTERFACE in vars(derived) and derived.__weakrefoffset__:
            yield derived
        else:
            yield from _defining(derived, seen)


def ranges(arrays: Iterable[Any]) -> list[tuple[int, int]]:
    """Return address and bytes of the device memory of each array. Arrays without memory are left out."""
    found = []
    for array in arrays:
        try:
            interface = getattr(array, _INTERFACE)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            continue  # the array is on the host, or was deleted: the libraries raise then
        found.append(extent(interface))
    return [(address, nbytes) for address, nbytes in found if address and nbytes]


def extent(interface: Mapping[str, Any]) -> tuple[int, int]:
    """Return an array's lowest address, and the bytes up to its highest one. Strides may be negative."""
    (address, _), shape = interface["data"], interface["shape"]
    item_bytes = np.dtype(interface["typestr"]).itemsize
    if 0 in shape:
        return address, 0
    strides = interface.get("strides")
    if strides is None:
        return address, item_bytes * math.prod(shape)
    reach = [(count - 1) * stride for count, stride in zip(shape, strides, strict=True)]
    low, high = (sum(bound(0, each) for each in reach) for bound in (min, max))
    return address + low, high - low + item_bytes
