"""Of which storages tensors are made, and how they are labelled."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import attrgetter

import torch

_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
_TensorBase = torch._C.TensorBase
_dtype, _layout = attrgetter("dtype"), attrgetter("layout")
Described = tuple[list[torch.UntypedStorage], list[str]]


def plain(tensors: Sequence[torch.Tensor]) -> Described | None:
    """The storage under each tensor, and labels of the tensors.

    If all are what they seem: strided, over one storage, no wrapper around others, not quantized.
    """
    dtypes = list(map(_dtype, tensors))
    if (
        list(map(_layout, tensors)).count(torch.strided) < len(tensors)
        or not _QUANTIZED.isdisjoint(dtypes)
        or any(hasattr(kind, "__tensor_flatten__") for kind in set(map(type, tensors)))
    ):
        return None
    # One of them may have no storage, or no one size.
    with suppress(RuntimeError, NotImplementedError):
        storages = list(map(_TensorBase.untyped_storage, tensors))
        return storages, list(map(_description, dtypes, map(_TensorBase.size, tensors)))
    return None


def pieced(tensors: Sequence[torch.Tensor]) -> Described:
    """The storages under whatever makes up the tensors, and labels of these parts."""
    parts = [part for tensor in tensors for part in strided_parts(tensor)]
    return [part.untyped_storage() for part in parts], list(map(describe_tensor, parts))


def strided_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own that make up ``tensor``; itself, if it is a plain one."""
    names = _SPARSE_PARTS.get(tensor.layout)
    if names is not None:
        yield from (getattr(tensor, name)() for name in names)
    elif hasattr(type(tensor), "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            part = getattr(tensor, name)
            if issubclass(type(part), torch.Tensor):  # a DTensor names its mesh, too
                yield from strided_parts(part)
    elif torch._C._has_storage(tensor):
        yield tensor
        if tensor.is_quantized and tensor.qscheme() in _PER_CHANNEL:
            yield from (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())


def describe_tensor(tensor: torch.Tensor) -> str:
    """Dtype and shape, like ``float32 [64, 3]``."""
    return _description(tensor.dtype, None if tensor.is_nested else tensor.size())


@functools.lru_cache(maxsize=4096)
def _description(dtype: torch.dtype, shape: torch.Size | None) -> str:
    return f"{str(dtype).removeprefix('torch.')} {'nested' if shape is None else list(shape)}"
