"""Autograd graphs that are still to be run backward: the memory that their nodes have saved cannot move.

Most scripts keep a graph without knowing it: the local variable ``loss`` is its root until the next batch.
After ``backward()`` such a graph is dead. Its nodes have given back what they saved, and nobody will run them
again; of what can move it only refers to the parameters, by the nodes that collect their gradients.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

_RAW = "_raw_saved_"


def pending_node(tensors: Sequence[torch.Tensor], device: torch.device) -> str | None:
    """The name of a node that has memory of ``device`` saved, in the graphs behind ``tensors``; or ``None``.

    Nothing is unpacked: hooks for saved tensors, such as those of checkpointed activations, do not run.
    """
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if any(_is_on(data, device) for data in _saved(node)):
            return str(node.name())
        further = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= further
        waiting += further
    return None


def collects_for_somebody(parameter: torch.Tensor) -> bool:
    """Whether Python code holds the node that collects a parameter's gradient: its hooks must not be lost."""
    return _references(parameter) > _references_by_a_graph()


def _references(parameter: torch.Tensor) -> int:
    """How often Python refers to the node, while there is a graph: some versions of torch count that, too."""
    with torch.enable_grad():
        graph = parameter.view_as(parameter)
    assert graph.grad_fn is not None
    node = graph.grad_fn.next_functions[0][0]
    return sys.getrefcount(node)


@functools.cache
def _references_by_a_graph() -> int:
    """`_references` of a parameter whose node nobody holds."""
    return _references(torch.zeros(1, requires_grad=True))


def _saved(node: Any) -> Iterator[Any]:
    """What a node has saved and not given back, as far as it can be told; `True` where it cannot."""
    for name in dir(node):
        if name.startswith(_RAW):
            try:
                saved = getattr(node, name)
            except RuntimeError:  # "Trying to backward through the graph a second time"
                continue
            for one in saved if isinstance(saved, Iterable) else (saved,):
                # Before torch 2.9 a saved tensor did not show what is in it.
                yield getattr(one, "data", True)


def _is_on(data: Any, device: torch.device) -> bool:
    if isinstance(data, torch.Tensor):
        return data.device == device
    return data is not None  # a hook has put it away, who knows where, or it cannot be told
