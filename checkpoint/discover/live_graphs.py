"""Memory held by live autograd graphs, which cannot move while a graph may still be run backward.

Most scripts keep a graph without knowing: the local variable ``loss`` is its root until the next batch. After
``backward()`` such a graph is dead. Its nodes have released what they saved, and no code will run them again.
Of memory that moves it only refers to the parameters, by the nodes that collect their gradients.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gpuslice.kernels import Device

from .live_instances import live_instances
from .storages import sweep

#: Why activations that no Python object refers to stay on the device (`SwitchRecord.resident`). They stay
#: exact, because no code runs the graph while the job is suspended.
REASON = "only a live autograd graph holds it"
_RAW = "_raw_saved_"


def pending_node(tensors: Sequence[torch.Tensor], device: torch.device) -> str | None:
    """Return the name of an autograd node behind ``tensors`` that has saved memory of ``device``, or None.

    Nothing is unpacked: hooks for saved tensors, such as those of checkpointed activations, do not run.
    """
    for node in _nodes([tensor.grad_fn for tensor in tensors]):
        if any(_is_on(data, device) for data in _saved(node)):
            return str(node.name())
    return None


def held_bytes(device: Device) -> int:
    """Return the bytes on ``device`` that can be reached only through the graphs of live tensors.

    Versions of torch that do not show what a node has saved count as having saved nothing.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction():
        (tensors,) = live_instances(torch.Tensor)
        graphs = [tensor.grad_fn for tensor in tensors if not tensor.is_leaf]
        del tensors
        if not graphs:
            return 0
        known = {one.key for one in sweep(device)}  # before this function refers to saved tensors
        saved = [data for node in _nodes(graphs) for data in _saved(node) if isinstance(data, torch.Tensor)]
        storages = [data.untyped_storage() for data in saved if data.layout is torch.strided]
        alone = {storage._cdata: storage for storage in storages if storage._cdata not in known}
        return sum(storage.nbytes() for storage in alone.values() if device.owns(storage))


def is_spent(tensor: torch.Tensor) -> bool:
    """Return True if the graph behind a tensor was run backward. It has then released all that it saved."""
    nodes = list(_nodes([tensor.grad_fn]))
    if any(data is not None for node in nodes for data in _saved(node)):
        return False
    return any(_has_given_back(node) for node in nodes)


def _has_given_back(node: Any) -> bool:
    """Return True if a node without saved tensors once had some: torch then refuses to show them."""
    for name in _names(node.__class__):
        try:
            getattr(node, name.removeprefix("_raw"))
        except RuntimeError:
            return True
    return False


def has_held_gradient_node(parameter: torch.Tensor) -> bool:
    """Return True if Python code, hooks for instance, holds the node that collects a parameter's gradient."""
    return _references(parameter) > _references_by_a_graph()


def _references(parameter: torch.Tensor) -> int:
    """Return Python's reference count of a parameter's gradient node while a graph exists.

    Some versions of Python and torch count the graph, too.
    """
    with torch.enable_grad():
        graph = parameter.view_as(parameter)
    assert graph.grad_fn is not None
    node = graph.grad_fn.next_functions[0][0]
    return sys.getrefcount(node)


@functools.cache
def _references_by_a_graph() -> int:
    """Return `_references` for a parameter whose node no Python code holds."""
    return _references(torch.zeros(1, requires_grad=True))


def _nodes(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield every node of the graphs once."""
    waiting = [root for root in roots if root is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        further = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= further
        waiting += further


def _saved(node: Any) -> Iterator[Any]:
    """Yield what a node has saved and not released; `True` for each item that torch does not show."""
    for name in _names(node.__class__):
        try:
            saved = getattr(node, name)
        except RuntimeError:  # "Trying to backward through the graph a second time"
            continue
        for one in saved if isinstance(saved, (list, tuple)) else (saved,):
            try:
                yield getattr(one, "data", True)  # before torch 2.9 a saved tensor did not show what is in it
            except RuntimeError:
                yield True


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_RAW))


def _is_on(data: Any, device: torch.device) -> bool:
    if isinstance(data, torch.Tensor):
        return data.device == device
    return data is not None  # a hook has moved it somewhere, or torch does not show it
