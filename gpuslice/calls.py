"""Where the outermost ``nn.Module`` is called, in a script that does nothing but evaluate.

Every layer of a model is called like the model. So that nobody pays for that, calls are watched only while
they may count: from the beginning, and from every ``model.eval()``, to the first batch, optimizer step or
backward pass; and, once an outermost call was seen, those of its class only.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from gpuslice.boundaries import BoundaryCounter
from gpuslice.ending import deliver

#: What is on the stack below whatever a module's call runs.
_WITHIN = frozenset({nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__})


class OutermostCalls:
    """Counts the outermost calls of modules in the main thread.

    Parameters
    ----------
    boundaries
        The process's counter; it says when calls count.
    optimizing
        Whether the script has an optimizer: calls with gradients are then part of a step to come.
    """

    def __init__(self, boundaries: BoundaryCounter, optimizing: Callable[[], bool]) -> None:
        self._boundaries = boundaries
        self._optimizing = optimizing
        self._main = threading.main_thread().ident
        self._original_call, self._original_eval = nn.Module.__call__, nn.Module.eval
        self._watched: type | None = None
        nn.Module.eval = _OnLookup(nn.Module.eval, self._evaluates)  # type: ignore[method-assign, assignment]
        self._watch(nn.Module)

    def remove(self) -> None:
        """Leave torch as it was."""
        self._watch(None)
        nn.Module.eval = self._original_eval  # type: ignore[method-assign]

    def _watch(self, kind: type | None) -> None:
        """Watch the calls of modules of this class from now on, and no others."""
        former, self._watched = self._watched, kind
        if former is nn.Module:
            nn.Module.__call__ = self._original_call  # type: ignore[method-assign]
        elif former is not None:
            del former.__call__
        if kind is not None:
            setattr(kind, "__call__", _OnLookup(self._original_call, self._called))  # noqa: B010

    def _evaluates(self, module: object) -> None:
        if threading.get_ident() != self._main or torch.compiler.is_compiling():
            return
        self._boundaries.expect_calls()
        if self._watched is not nn.Module:
            self._watch(nn.Module)

    def _called(self, module: object) -> None:
        if threading.get_ident() != self._main or torch.compiler.is_compiling():
            return
        if not self._boundaries.calls_count:
            self._watch(None)
        elif torch._C._current_graph_task_id() == -1 and not _within_call(sys._getframe(2)):
            self._count(type(module))

    def _count(self, kind: type) -> None:
        if torch.is_grad_enabled() and self._optimizing():
            return
        if self._watched is nn.Module and type(kind) is type and kind.__call__ is self._original_call:
            self._watch(kind)
        late = self._boundaries.calling()
        if late:
            deliver(late)


def _within_call(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _WITHIN:
            return True
        frame = frame.f_back
    return False


class _OnLookup:
    """Stands in for a method; looking it up on an object, to call it, is noticed.

    As with ``BeforeFetch`` no frame of ours is on the stack while the method runs.
    """

    def __init__(self, original: Callable[..., Any], notice: Callable[[object], None]) -> None:
        self._original = original
        self._notice = notice

    def __get__(self, module: object | None, owner: type | None = None) -> Callable[..., Any]:
        if module is not None:
            self._notice(module)
        found: Callable[..., Any] = self._original.__get__(module, owner)
        return found
