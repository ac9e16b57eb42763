"""Waiting before memory is handed out in a way that torch does not count: ``tensor.data``, NumPy, pointers.

Changes through torch's own operations show in a tensor's version counter. What is written through these does
not, so that whoever asks for one waits until nothing depends on the memory any more.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch

_METHODS = ("numpy", "__array__", "__dlpack__", "data_ptr", "storage", "untyped_storage")
_MISSING = object()


class RawAccess:
    """Between `watch` and `leave`, ``wait`` is called whenever this thread asks a tensor for its memory.

    Other threads are not made to wait: the one that copies may be among them.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._thread = threading.get_ident()
        self._replaced: dict[str, object] = {}

    def watch(self) -> None:
        """Begin."""
        self._replace("data", self._attribute(inspect.getattr_static(torch.Tensor, "data")))
        for name in _METHODS:
            self._replace(name, self._method(getattr(torch.Tensor, name)))

    def leave(self) -> None:
        """End; harmless without a beginning."""
        while self._replaced:
            name, former = self._replaced.popitem()
            if former is _MISSING:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, former)

    def _replace(self, name: str, new: object) -> None:
        self._replaced[name] = torch.Tensor.__dict__.get(name, _MISSING)
        setattr(torch.Tensor, name, new)

    def _before(self) -> None:
        if threading.get_ident() == self._thread:
            self._wait()

    def _attribute(self, original: Any) -> property:
        def get(tensor: torch.Tensor) -> Any:
            self._before()
            return original.__get__(tensor)

        def put(tensor: torch.Tensor, value: Any) -> None:
            self._before()
            original.__set__(tensor, value)

        return property(get, put)

    def _method(self, original: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            self._before()
            return original(tensor, *arguments, **options)

        return method
