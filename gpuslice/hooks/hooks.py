"""Hooks that count boundaries in an unmodified script: batches, steps, backward passes, calls (docs/run.md).

Every process below ``gpuslice run`` counts boundaries. ``installation`` connects a controller to the counter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from gpuslice.hooks.backward_passes import AfterBackward
from gpuslice.hooks.module_calls import OutermostCalls
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.ending import deliver
from gpuslice.runtime.threads.training_thread import TrainingThread


class BeforeFetch:
    """A stand-in for ``_BaseDataLoaderIter.__next__`` that counts a boundary before each fetch.

    This is a descriptor instead of a wrapper. No frame of ours is on the stack while the batch is fetched,
    so an exception of a user's dataset carries the user's own traceback.
    """

    def __init__(
        self, original: Callable[[Any], Any], fetching: Callable[[], Sequence[int]], thread: TrainingThread
    ) -> None:
        self._original = original
        self._fetching = fetching
        self._may_train = thread.may_train

    def __get__(self, iterator: object | None, owner: type | None = None) -> Callable[..., Any]:
        fetch: Callable[..., Any] = self._original.__get__(iterator, owner)
        if iterator is not None and self._may_train():
            late = self._fetching()
            if late:
                deliver(late)
        return fetch


class Hooks:
    """The hooks of this process's DataLoaders, optimizers, backward passes and modules."""

    def __init__(self, boundaries: BoundaryCounter) -> None:
        self._boundaries = boundaries
        self._has_run_backward = False
        boundaries.hooked = True
        self._fetch = dataloader._BaseDataLoaderIter.__next__
        fetch = BeforeFetch(self._fetch, boundaries.fetching, boundaries.thread)
        dataloader._BaseDataLoaderIter.__next__ = fetch  # type: ignore[method-assign, assignment]
        self._others = (
            register_optimizer_step_post_hook(self._stepped),
            AfterBackward(self._backward_ended),
            OutermostCalls(boundaries, _has_optimizer),
        )

    def remove(self) -> None:
        """Remove all these hooks from torch."""
        dataloader._BaseDataLoaderIter.__next__ = self._fetch  # type: ignore[method-assign]
        for hook in self._others:
            hook.remove()

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # While dynamo traces, only set a mark: counting would be a side effect that the graph guards on.
        if torch.compiler.is_compiling():
            self._boundaries.compiled_step = True
            return
        if torch._C._current_graph_task_id() != -1 or _inside_another_step():
            return
        boundaries = self._boundaries
        if not boundaries.thread.trains():
            boundaries.steps += 1  # the job's step, although another thread's boundaries count
            return
        late = boundaries.stepped()
        if late:
            deliver(late)

    def _backward_ended(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if torch.compiler.is_compiling() or peek_interpreter_stack() is not None:
            return
        boundaries = self._boundaries
        if not boundaries.thread.trains():
            return
        if not self._has_run_backward:
            self._has_run_backward = True
            if _has_optimizer():
                boundaries.expect_steps()
        late = boundaries.backward_ended()
        if late:
            deliver(late)


def count_boundaries(boundaries: BoundaryCounter) -> Hooks:
    """Install and return the hooks that count this process's boundaries. Existing objects are hooked, too."""
    return Hooks(boundaries)


def _has_optimizer() -> bool:
    """Return True if an optimizer was made in this process. Torch then has wrapped the step of its class."""
    kinds = [torch.optim.Optimizer]
    for kind in kinds:
        if getattr(vars(kind).get("step"), "hooked", False):
            return True
        kinds += kind.__subclasses__()
    return False


def _inside_another_step() -> bool:
    """Return True if another step called the step that has just ended (``super().step()``).

    Only the outer step counts.
    """
    frame = sys._getframe(2)
    step_wrapper, caller = frame.f_code, frame.f_back
    while caller is not None:
        if caller.f_code is step_wrapper:
            return True
        caller = caller.f_back
    return False
