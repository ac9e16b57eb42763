"""Every live object of some types, by references that count."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import attrgetter, not_
from typing import Any

import torch

from . import heap

_cdata = attrgetter("_cdata")


def live_instances(*kinds: type) -> list[list[Any]]:
    """For each of these types every live object of it, or of types derived from it.

    The collector also shows objects that no Python code refers to any more and C++ keeps for later. A new
    reference to such a one keeps nothing alive until torch is told of it (``_fix_weakref``).
    """
    found = heap.look(*kinds)
    with torch._C.DisableTorchFunction():
        for number, kind in enumerate(kinds):
            if issubclass(kind, torch.Tensor):
                for_each(torch.Tensor._fix_weakref, found[number])  # type: ignore[attr-defined]
            elif issubclass(kind, torch.UntypedStorage):
                found[number] = list(firmly(found[number]))
    return found


def firmly(storages: Sequence[torch.UntypedStorage]) -> Sequence[torch.UntypedStorage]:
    """Those that are not gone, by references that count.

    Some versions of torch destroy a storage's Python object only with the last weak reference to the
    storage, such as those that torch.multiprocessing keeps; using it would revive the storage and destroy
    it twice.
    """
    expired = list(map(torch.UntypedStorage._expired, map(_cdata, storages)))
    if any(expired):
        storages = list(compress(storages, map(not_, expired)))
    for_each(torch.UntypedStorage._fix_weakref, storages)  # type: ignore[attr-defined]
    return storages


def for_each(call: Callable[..., object], *items: Iterable[object]) -> None:
    """Call for each item, without going through the interpreter's loop."""
    deque(map(call, *items), maxlen=0)
