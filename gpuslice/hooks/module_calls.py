"""Where the outermost ``nn.Module`` is called, in a script that does nothing but evaluate.

Every layer of a model is called like the model. So that nobody pays for that, calls are watched only while
they may count: from the beginning, and from every ``model.eval()``, to the first batch, optimizer step or
backward pass; and, once an outermost call was seen, those of its class only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack

from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.ending import deliver

#: What is on the stack below whatever a module's call runs. Compared by identity: code is slow to hash.
_WITHIN = nn.Module._call_impl.__code__


_graph_task, _grad_enabled = torch._C._current_graph_task_id, torch.is_grad_enabled


class OutermostCalls:
    """Counts the outermost calls of modules in the thread that trains.

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
        self._original_call, self._original_eval = nn.Module.__call__, nn.Module.eval
        self._watched: type | None = None
        self._hook: _OnLookup | None = None
        nn.Module.eval = _OnLookup(nn.Module.eval, self._evaluates)  # type: ignore[method-assign, assignment]
        self._watch(nn.Module)

    def remove(self) -> None:
        """Leave torch as it was."""
        self._watch(None)
        nn.Module.eval = self._original_eval  # type: ignore[method-assign]

    def _watch(self, kind: type | None) -> None:
        """Watch the calls of modules of this class from now on, and no others."""
        former, self._watched = self._watched, kind
        # While torch.fx traces, it has a function of its own in the place of that of nn.Module.
        if former is not None and vars(former).get("__call__") is self._hook:
            if former is nn.Module:
                nn.Module.__call__ = self._original_call  # type: ignore[method-assign]
            else:
                del former.__call__
        if kind is not None:
            look_up = _OnLookup if kind is nn.Module else _OnLookupInSubclass
            self._hook = look_up(self._original_call, self._called)
            setattr(kind, "__call__", self._hook)  # noqa: B010

    def _evaluates(self, module: object) -> None:
        if torch.compiler.is_compiling() or not self._boundaries.thread.may_train():
            return
        self._boundaries.expect_calls()
        # Having traced, torch.fx leaves what it has found by asking for it: the function, not the hook.
        if vars(nn.Module)["__call__"] is self._original_call:
            self._watch(nn.Module)

    def _called(self, module: object) -> None:
        boundaries = self._boundaries
        if not boundaries.thread.may_train():
            return
        if not boundaries.counts_module_calls:
            self._watch(None)
            return
        # All in one function: it is called for every layer, until it is known which class is outermost.
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is _WITHIN:
                return
            frame = frame.f_back
        if _graph_task() != -1 or (_grad_enabled() and self._optimizing()) or torch.compiler.is_compiling():
            return
        if peek_interpreter_stack() is not None:
            return
        if self._watched is nn.Module:
            self._narrow(type(module))
        if late := boundaries.calling():
            deliver(late)

    def _narrow(self, kind: type) -> None:
        """From now on only calls of this class; not if it has a way of its own to be called."""
        if type(kind) is type and kind.__call__ is self._original_call:
            self._watch(kind)


class _OnLookup:
    """Stands in for a method; looking it up on an object, to call it, is noticed.

    As with ``BeforeFetch`` no frame of ours is on the stack while the method runs.
    """

    def __init__(self, original: Callable[..., Any], notice: Callable[[object], None]) -> None:
        self._original = original
        self._notice = notice

    def __get__(self, module: object | None, owner: type | None = None) -> Callable[..., Any]:
        if module is None:
            return self._original
        self._notice(module)
        return MethodType(self._original, module)


class _OnLookupInSubclass(_OnLookup):
    """The same for ``__call__`` of a subclass: it is called by what ``nn.Module`` has there at the time."""

    def __get__(self, module: object | None, owner: type | None = None) -> Callable[..., Any]:
        self._original = nn.Module.__call__
        return super().__get__(module, owner)
