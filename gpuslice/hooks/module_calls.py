"""Counts calls of the outermost ``nn.Module`` as boundaries, in a script that only evaluates.

Every layer of a model is called like the model itself, so watching all calls is expensive. Calls are watched
only while they may count: from the beginning, and from every ``model.eval()``, until the first batch,
optimizer step or backward pass. Once an outermost call was seen, only calls of its class are watched.
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

#: The code that is on the stack while a module's call runs. Compared by identity: code is slow to hash.
_WITHIN = nn.Module._call_impl.__code__


_graph_task, _grad_enabled = torch._C._current_graph_task_id, torch.is_grad_enabled


class OutermostCalls:
    """The hooks that count outermost calls of modules in the thread that trains.

    Parameters
    ----------
    boundaries
        The process's counter. It says when calls count.
    optimizing
        Returns True if the script has an optimizer. Calls with gradients then belong to a step, and do not
        count.
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
        """Remove the hooks from ``nn.Module``."""
        self._watch(None)
        nn.Module.eval = self._original_eval  # type: ignore[method-assign]

    def _watch(self, kind: type | None) -> None:
        """Watch only calls of modules of class ``kind`` from now on; if it is None, watch no calls."""
        former, self._watched = self._watched, kind
        # While torch.fx traces, nn.Module.__call__ is a function of torch.fx, which must stay.
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
        # After a trace, torch.fx restores what it had looked up: the original function, not our hook.
        if vars(nn.Module)["__call__"] is self._original_call:
            self._watch(nn.Module)

    def _called(self, module: object) -> None:
        boundaries = self._boundaries
        if not boundaries.thread.may_train():
            return
        if not boundaries.counts_module_calls:
            self._watch(None)
            return
        # All in one function, for speed: it runs for every layer until the outermost class is known.
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
        """Watch only calls of ``kind`` from now on, unless it has a metaclass or its own ``__call__``."""
        if type(kind) is type and kind.__call__ is self._original_call:
            self._watch(kind)


class _OnLookup:
    """A stand-in for a method: calls ``notice`` with the object whenever the method is looked up.

    As with ``BeforeFetch``, no frame of ours is on the stack while the method runs.
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
    """A stand-in for ``__call__`` of a subclass. It calls what ``nn.Module.__call__`` is at that time."""

    def __get__(self, module: object | None, owner: type | None = None) -> Callable[..., Any]:
        self._original = nn.Module.__call__
        return super().__get__(module, owner)
