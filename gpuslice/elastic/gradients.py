"""Add up accumulated gradients over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from gpuslice.checkpoint.named.shards import is_distributed, local_part
from gpuslice.errors import UsageError

#: Approximate size of the buffers in which gradients are added up.
BUCKET_BYTES = 32 << 20


def require_clear(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Refuse gradients that are left from the batch before: they are already sums over all ranks.

    Raises
    ------
    UsageError
        Naming the parameter.
    """
    for name, parameter in parameters:
        if parameter.grad is not None and _any(parameter.grad):
            raise UsageError(
                f"{name} still has the gradient of the last batch", "call optimizer.zero_grad() in between"
            )


def add_up(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Replace every gradient by its sum over all ranks; a collective.

    FSDP does that itself for parameters that it has divided. A parameter without a gradient on any rank keeps
    none, so that optimizers skip it.

    Raises
    ------
    UsageError
        If a gradient is sparse.
    """
    for name, parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise UsageError(f"{name} has a sparse gradient", "leave out sparse=True")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    whole = [one for _, one in parameters if one.requires_grad and not is_distributed(one)]
    for bucket in _buckets(whole):
        _add_up(bucket)


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Yield groups of parameters of one device and dtype, in an order that all ranks share."""
    alike: dict[tuple[str, torch.dtype], list[torch.nn.Parameter]] = {}
    filled_bytes: Counter[tuple[str, torch.dtype]] = Counter()
    for parameter in parameters:
        kind = (parameter.device.type, parameter.dtype)
        if filled_bytes[kind] and filled_bytes[kind] + parameter.nbytes > BUCKET_BYTES:
            filled_bytes[kind] = 0
            yield alike.pop(kind)
        alike.setdefault(kind, []).append(parameter)
        filled_bytes[kind] += parameter.nbytes
    yield from alike.values()


def _add_up(bucket: Sequence[torch.nn.Parameter]) -> None:
    first = bucket[0]
    there = torch.tensor([one.grad is not None for one in bucket], dtype=first.dtype, device=first.device)
    parts = [
        torch.zeros_like(one).reshape(-1) if one.grad is None else one.grad.detach().reshape(-1)
        for one in bucket
    ]
    buffer = torch.cat([*parts, there])
    dist.all_reduce(buffer)
    *sums, counts = buffer.split([*(one.numel() for one in bucket), len(bucket)])  # type: ignore[no-untyped-call]
    for one, total, count in zip(bucket, sums, counts.tolist(), strict=True):
        if one.grad is not None:
            one.grad.copy_(total.view_as(one))
        elif count:
            one.grad = total.view_as(one).clone()


def _any(gradient: torch.Tensor) -> bool:
    """Return True if any element of this rank's part of a gradient is not 0."""
    return bool((local_part(gradient) if is_distributed(gradient) else gradient).any())
