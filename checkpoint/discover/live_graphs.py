"""What a live autograd graph alone keeps on the device: activations that no Python object refers to.

They stay where they are while the job is suspended. That is exact, because nobody runs the graph meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from gpuslice.kernels import Device

from .live_instances import live_instances
from .storages import sweep

#: Why they stay (`SwitchRecord.resident`).
REASON = "only a live autograd graph holds it"
_RAW = "_raw_saved_"


def held_bytes(device: Device) -> int:
    """Bytes on ``device`` that can be reached only through the graphs of live tensors.

    Versions of torch that do not show what a node has saved are believed to have saved nothing.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction():
        (tensors,) = live_instances(torch.Tensor)
        graphs = [tensor.grad_fn for tensor in tensors if not tensor.is_leaf]
        del tensors
        if not graphs:
            return 0
        known = {one.key for one in sweep(device)}  # before we refer to what the nodes have saved
        saved = [tensor.untyped_storage() for node in _nodes(graphs) for tensor in _saved(node)]
        alone = {storage._cdata: storage for storage in saved if storage._cdata not in known}
        return sum(storage.nbytes() for storage in alone.values() if device.owns(storage))


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Every node of the graphs, once."""
    waiting = [root for root in roots if root is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """The strided tensors that a node has saved and not given up."""
    for name in _names(node.__class__):
        found: Any = None
        with suppress(RuntimeError):  # it has given them up
            found = getattr(node, name)
        for raw in found if isinstance(found, (list, tuple)) else (found,):
            tensor = None
            with suppress(RuntimeError):
                tensor = getattr(raw, "data", None)
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                yield tensor


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_RAW))
