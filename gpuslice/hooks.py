"""Hooks into an unmodified script: DataLoader's ``__next__`` and the optimizers' step (docs/hooks.md).

``install`` is called once, right after the script's ``import torch``, by gpuslice's ``sitecustomize``.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader
from torch.utils.hooks import RemovableHandle

from gpuslice import agent, drill, uncaught
from gpuslice.boundaries import BoundaryCounter, Controller
from gpuslice.checkpoint.heap import hide_imports
from gpuslice.ending import deliver, end, ended_well, say
from gpuslice.errors import GpusliceError
from gpuslice.runtime import Runtime, runtime
from gpuslice.threads import Early


class JobController(Controller, Protocol):
    """A controller with a beginning and an end."""

    def start(self) -> None:
        """Called before the script has any state; may hold it there."""
        ...

    def finish(self) -> None:
        """Called when the script has ended."""
        ...


def install(early: Early | None = None) -> None:
    """Make this process a job under gpuslice, as the settings in the environment say.

    Parameters
    ----------
    early
        The script's threads that have started before.

    Raises
    ------
    SystemExit
        After a message, with the error's exit code, if what the user asked for is impossible here.
    """
    uncaught.install()
    try:
        job = runtime()
        if early is not None:
            job.gate.take_in(early)
        count_boundaries(job.boundaries)
        controller = _controller(job)
        job.boundaries.controller = controller
        os.register_at_fork(after_in_child=job.boundaries.forget_controller)
        if job.settings.checkpoint_every:
            job.checkpoint_every(job.settings.checkpoint_every)
        if controller is not None:
            job.keep_ready()
            controller.start()
        if not job.settings.socket:
            job.move_in()
    except GpusliceError as error:
        end(error)
    hide_imports()
    atexit.register(_finish, job, controller, os.getpid())


def _controller(job: Runtime) -> JobController | None:
    if job.settings.socket:
        return agent.Agent(job)
    return drill.from_settings(job)


def _finish(job: Runtime, controller: JobController | None, pid: int) -> None:
    """The script has ended, well or not."""
    if os.getpid() != pid:
        return
    job.boundaries.forget_controller()
    job.checkpoints.settle(keep=not ended_well())
    if controller is not None:
        controller.finish()
    job.write_report()
    if controller is not None or job.settings.report:
        say(job.summary())


class BeforeFetch:
    """Stands in for ``_BaseDataLoaderIter.__next__``; looking that up, to call it, is a boundary.

    A descriptor instead of a wrapper: when the batch is fetched, no frame of ours is on the stack, so
    what a user's dataset raises carries the user's own traceback.
    """

    def __init__(self, original: Callable[[Any], Any], fetching: Callable[[], Sequence[int]]) -> None:
        self._original = original
        self._fetching = fetching
        self._main = threading.main_thread().ident

    def __get__(self, iterator: object | None, owner: type | None = None) -> Callable[..., Any]:
        fetch: Callable[..., Any] = self._original.__get__(iterator, owner)
        if iterator is not None and threading.get_ident() == self._main:
            late = self._fetching()
            if late:
                deliver(late)
        return fetch


def count_boundaries(boundaries: BoundaryCounter) -> RemovableHandle:
    """Hook this process's DataLoaders and optimizers, those that exist already included.

    Returns the handle of the optimizer hook.
    """
    iterator = dataloader._BaseDataLoaderIter
    boundaries.hooked = True
    iterator.__next__ = BeforeFetch(iterator.__next__, boundaries.fetching)  # type: ignore[method-assign, assignment]
    main = threading.main_thread().ident

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # In a graph that dynamo traces, counting would be a side effect to guard on.
        if torch.compiler.is_compiling() or threading.get_ident() != main:
            return
        if torch._C._current_graph_task_id() == -1 and not _inside_another_step():
            late = boundaries.stepped()
            if late:
                deliver(late)

    return register_optimizer_step_post_hook(stepped)


def _inside_another_step() -> bool:
    """Whether the step that calls the hook was called by another (``super().step()``): that one counts."""
    frame = sys._getframe(2)
    step_wrapper, caller = frame.f_code, frame.f_back
    while caller is not None:
        if caller.f_code is step_wrapper:
            return True
        caller = caller.f_back
    return False
