"""Marks: cheap values that differ if a tensor, array, large container or opaque object has changed.

Memory up to `HASHED_BYTES` is hashed whole. Larger memory counts as changed, except in a data set, where
torch's version counters and samples decide. The mark of an object of another language is the checksum of its
pickle.
"""

from __future__ import annotations

import inspect
import io
import operator
import pickle
import sys
import types
import weakref
import zlib
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from gpuslice.checkpoint.format.checksums import digest

from .kinds import LEAVES, is_proxy, is_shared_value

#: Memory up to this size is hashed whole at each snapshot; of larger data, this many pieces of this size.
HASHED_BYTES, _PIECE_BYTES, _PIECES = 16 << 20, 4 << 10, 256
#: Objects of another language with a larger pickle are not compared.
PICKLED_BYTES = 4 << 20
#: Greatest depth of nested lists, tuples and dictionaries of plain values that are compared as a whole.
_DEPTH = 3


class Unknowable:
    """A mark, equal to no other, for an object that may change unnoticed."""


def of_tensor(tensor: torch.Tensor, *, data: bool) -> object:
    """Return a mark of a tensor's memory that differs when the memory has changed."""
    # Not its address: a suspend gives memory back, and a resume gets other memory.
    shape = tuple(tensor.shape), tensor.dtype
    version = -1 if tensor.is_inference() else tensor._version
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    if not plain or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return (*shape, version) if data else Unknowable()
    memory = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return *shape, version if memory.nbytes > HASHED_BYTES else 0, _hashed(memory, data=data)


def of_array(array: np.ndarray[Any, Any], *, data: bool) -> object:
    """Return a mark of an array's memory that differs when the memory has changed."""
    if array.dtype.hasobject:
        return items_mark(array.reshape(-1).tolist()) if array.dtype == object else Unknowable()
    shape = (array.shape, array.dtype.str)
    if data and not array.flags.writeable and array.nbytes > HASHED_BYTES:
        return *shape, array.__array_interface__["data"][0]
    whole = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    return *shape, _hashed(whole.reshape(-1).view(np.uint8), data=data)


def _hashed(memory: np.ndarray[Any, Any], *, data: bool) -> object:
    if memory.nbytes <= HASHED_BYTES:
        return digest(memory.data) if memory.nbytes else 0
    if not data:
        return Unknowable()
    starts = np.linspace(0, memory.nbytes - _PIECE_BYTES, _PIECES, dtype=np.int64)
    return digest(b"".join(memory[start : start + _PIECE_BYTES].tobytes() for start in starts))


class Columns:
    """The plain values of a large container, level by level, kept to be compared by identity.

    Attributes
    ----------
    values
        The items, then what is in them, and so on.
    lengths
        Number of values of each item, by level.
    fixed
        True if the items themselves cannot change, so that comparing them is enough.
    """

    def __init__(self, values: Sequence[Sequence[Any]], lengths: Sequence[list[int]], *, fixed: bool) -> None:
        self.values, self.lengths, self.fixed = values, lengths, fixed

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Columns) and self.lengths == other.lengths and _same(self.values, other.values)
        )

    __hash__ = None  # type: ignore[assignment]

    def holds(self, items: Sequence[Any]) -> bool:
        """Return True if these items are the kept ones, and none of them can have changed."""
        return self.fixed and _same(self.values[:1], [items])


def _same(first: Sequence[Sequence[Any]], second: Sequence[Sequence[Any]]) -> bool:
    return len(first) == len(second) and all(
        len(mine) == len(its) and all(map(operator.is_, mine, its))
        for mine, its in zip(first, second, strict=True)
    )


def items_mark(items: Sequence[Any], earlier: Columns | None = None) -> Columns | None:
    """Return the mark of a container that holds plain values only, up to some levels deep; else None.

    ``earlier`` is the mark that the container had before.
    """
    if earlier is not None and earlier.holds(items):
        return earlier
    values: list[Sequence[Any]] = [list(items)]
    lengths: list[list[int]] = []
    fixed = True
    while True:
        kinds = set(map(type, values[-1])) - LEAVES
        if not kinds:
            return Columns(values, lengths, fixed=fixed)
        if len(lengths) == _DEPTH or not kinds <= {list, tuple, dict} or (dict in kinds and len(kinds) > 1):
            return None
        nested = values[-1]
        if set(map(type, nested)) != kinds:
            nested = [item for item in nested if type(item) in kinds]
        fixed = fixed and kinds == {tuple}
        lengths.append(list(map(len, nested)))
        inside: Iterable[Any] = chain.from_iterable(nested)
        if kinds == {dict}:
            keys = list(inside)
            if not set(map(type, keys)) <= LEAVES:
                return None
            values.append(keys)
            inside = chain.from_iterable(map(dict.values, nested))
        values.append(list(inside))


def of_opaque(item: Any) -> object:
    """Return a mark of an iterator, a file, or an object of another language (C++, Rust)."""
    if isinstance(item, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        return _of_generator(item)
    if isinstance(item, io.IOBase):
        return _of_file(item)
    if isinstance(item, Iterator):
        return _of_iterator(item)
    if isinstance(item, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)):
        return _of_pickle(list(item.values() if isinstance(item, MutableMapping) else item))
    if is_proxy(item):
        return _of_pickle(item._getvalue())
    if is_shared_value(item):
        item = item.get_obj()
    try:
        return digest(memoryview(item).cast("B"))
    except (TypeError, ValueError, BufferError):
        pass
    return _of_pickle(item)


def of_generator(item: object) -> int:
    """Return how many generators a NumPy generator has spawned. Its state does not have this number."""
    seeds = getattr(getattr(item, "bit_generator", None), "seed_seq", None)
    return int(getattr(seeds, "n_children_spawned", 0))


class _Sum:
    """A file that keeps the checksum of its content, and accepts at most `PICKLED_BYTES`."""

    def __init__(self) -> None:
        self._nbytes, self.checksum = 0, 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._nbytes += view.nbytes
        if self._nbytes > PICKLED_BYTES:
            raise ValueError("the object is too large to be compared")
        self.checksum = zlib.crc32(view, self.checksum)
        return view.nbytes


def _of_pickle(item: Any) -> object:
    written = _Sum()
    try:
        pickle.Pickler(written, protocol=5).dump(item)
    except Exception:  # noqa: BLE001 - pickling runs code of any class; what fails cannot be seen
        return Unknowable()
    return written.checksum


def is_foreign(item: object) -> bool:
    """Return True for an object of another language (C++, Rust) that is neither an iterator nor a file."""
    return not isinstance(item, (Iterator, types.CoroutineType, types.AsyncGeneratorType, io.IOBase))


def _of_generator(item: Any) -> object:
    if not isinstance(item, types.GeneratorType):
        return Unknowable()
    state = inspect.getgeneratorstate(item)
    return state if state in (inspect.GEN_CREATED, inspect.GEN_CLOSED) else Unknowable()


def _of_file(item: io.IOBase) -> object:
    if item.closed:
        return "closed"
    if item in (sys.stdin, sys.stdout, sys.stderr):
        return "standard"
    try:
        return item.tell()
    except (OSError, ValueError):
        return Unknowable()


def _of_iterator(item: Iterator[Any]) -> object:
    kind = type(item)
    if kind.__module__ == "itertools":
        return repr(item) if kind.__name__ in ("count", "repeat") else Unknowable()
    if kind.__module__ == "builtins" and kind.__name__.endswith("iterator"):
        return operator.length_hint(item, -1)
    return Unknowable()
