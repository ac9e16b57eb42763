"""The plain tensors that a tensor is made of, and labels for tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: The methods that give the parts of a sparse tensor.
SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)


def strided_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of their own that make up ``tensor``; itself if it is a plain one."""
    names = SPARSE_PARTS.get(tensor.layout)
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
    """Return dtype and shape, like ``float32 [64, 3]``."""
    shape = "nested" if tensor.is_nested else list(tensor.size())
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"
