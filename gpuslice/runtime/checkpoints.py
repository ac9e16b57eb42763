"""Checkpoints: snapshots of the attached state for a restart, copied while the training goes on.

A checkpoint becomes visible when all of it is in the RAM disk, and until then the previous one stays. One
that could not be taken (the RAM disk is full, something changed that should not have) costs a line on stderr,
never the training.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpuslice.checkpoint.switch.background_snapshot import BackgroundSnapshot
from gpuslice.clock import Clock, MonotonicClock
from gpuslice.errors import GpusliceError
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.ending import say, undisturbed
from gpuslice.runtime.run_report import Report
from gpuslice.training.attached import Attached

#: Starts a snapshot that copies the tensors of these paths at once; ``None`` where none can be taken.
Start = Callable[[Collection[str]], BackgroundSnapshot | None]


class Checkpoints:
    """The checkpoints of one process: at most one is under way.

    Parameters
    ----------
    report
        Counts them.
    """

    def __init__(self, report: Report, clock: Clock | None = None) -> None:
        self._report = report
        self._clock = clock or MonotonicClock()
        self._current: BackgroundSnapshot | None = None
        self._blocked_s = 0.0
        self._hasty: set[str] = set()
        self._hooked = False

    @property
    def under_way(self) -> bool:
        """Whether one was begun and has not been brought to its end."""
        return self._current is not None

    def begin(self, start: Start) -> bool:
        """Begin one, after the previous one has come to its end; whether it could be taken here.

        Raises
        ------
        GpusliceError
            If the state cannot be saved or the RAM disk is full; the previous checkpoint stays.
        """
        with _without_handlers():
            self.settle()
            self._watch_steps()
            began_s = self._clock.now()
            self._current = start(self._hasty)
            self._blocked_s = self._clock.now() - began_s
            return self._current is not None

    def advance(self) -> None:
        """In the main thread, between two batches: do what does not have to wait."""
        current = self._current
        if current is not None and current.copied:
            with _without_handlers():
                current.check()
                current.publish_soon()
                if current.over:
                    self.settle()

    def settle(self, *, keep: bool = True) -> None:
        """Bring the one under way to its end: published, or given up. The store may be used afterwards."""
        if self._current is None:
            return
        with _without_handlers():
            current, self._current = self._current, None
            if current is not None:
                self._end(current, keep=keep)

    def _end(self, current: BackgroundSnapshot, *, keep: bool) -> None:
        began_s = self._clock.now()
        snapshot = current.settle(keep=keep)
        self._blocked_s += self._clock.now() - began_s
        if snapshot is not None:
            self._report.checkpointed(current.nbytes, self._blocked_s)
        elif current.error is not None:
            say(f"the checkpoint at boundary {current.boundary} failed: {current.error}")
        elif current.changed:
            self._hasty.update(current.changed)
            say(
                f"the checkpoint at boundary {current.boundary} was given up: {current.changed[0]} changed "
                "before the optimizer's step; it will be copied at once from now on"
            )

    def _watch_steps(self) -> None:
        if not self._hooked:
            self._hooked = True
            register_optimizer_step_pre_hook(self._before_step)
            os.register_at_fork(after_in_child=self._forget)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """What waits to be copied is about to change."""
        # A step that is being compiled cannot wait; the version counters show then what it changed.
        current = self._current
        if current is None or torch.compiler.is_compiling():
            return
        began_s = self._clock.now()
        with _without_handlers():
            current.check()
            current.publish_soon()
        self._blocked_s += self._clock.now() - began_s

    def _forget(self) -> None:
        """A forked child has neither the threads nor the store."""
        self._current = None


def _without_handlers() -> AbstractContextManager[None]:
    """Inside the block the script's signal handlers wait, which run in the main thread.

    One that raises would leave the store with a snapshot that is being written for ever; one that suspends
    the job would wait for what it has interrupted.
    """
    main = threading.current_thread() is threading.main_thread()
    return undisturbed() if main else nullcontext()


def obstacle(attached: Attached | None, job: str) -> str | None:
    """Why a process of ``job`` can take no checkpoint at all, as a line for the user; ``None`` if it can."""
    if attached is None:
        return "no checkpoints: the script names no state to save; see gpuslice.attach"
    if not job:
        return "no checkpoints: the job has no name to find them by; give one with --job"
    return None


class Schedule:
    """Begins a checkpoint at every Nth boundary, or at the next one from which a restart is possible.

    Parameters
    ----------
    checkpoints
        Takes them.
    boundaries
        Calls ``at_boundary``.
    every
        N.
    obstacle
        Why none can be taken at all in this process, as a line for the user; ``None`` if it can.
    start
        See ``Checkpoints.begin``.
    hopeless
        Whether the next boundary is no better than one at which none could be begun.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        boundaries: BoundaryCounter,
        *,
        every: int,
        obstacle: Callable[[], str | None],
        start: Start,
        hopeless: Callable[[], bool] = lambda: False,
    ) -> None:
        self._hopeless = hopeless
        self._checkpoints = checkpoints
        self._boundaries = boundaries
        self._every = every
        self._obstacle = obstacle
        self._start = start
        self._complained = False
        self._due = every
        boundaries.saver = self.at_boundary
        boundaries.save_at = every

    def at_boundary(self, boundary: int) -> None:
        """Begin one if it is time, and help the one that is under way."""
        self._checkpoints.advance()
        if boundary >= self._due and self._begin():
            self._due = (boundary // self._every + 1) * self._every
        busy = self._checkpoints.under_way or boundary >= self._due
        self._boundaries.save_at = boundary + 1 if busy else self._due

    def _begin(self) -> bool:
        """Whether that is done for this time."""
        obstacle = self._obstacle()
        if obstacle is not None:
            if not self._complained:
                say(obstacle)
            self._complained = True
            return True
        try:
            return self._checkpoints.begin(self._start) or self._hopeless()
        except GpusliceError as error:
            say(error.message, error.remedy)
            return True
