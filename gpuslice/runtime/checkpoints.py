"""Checkpoints: snapshots of the attached state for a restart, copied while the training goes on.

A checkpoint becomes visible when all of it is in the RAM disk, and until then the previous one stays. If a
checkpoint cannot be taken (the RAM disk is full, a tensor changed too early), a line on stderr says so and
the training goes on.
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

#: Starts and returns a snapshot that copies the tensors of the given paths at once. Returns None where no
#: snapshot can be taken.
Start = Callable[[Collection[str]], BackgroundSnapshot | None]


class Checkpoints:
    """The checkpoints of one process: at most one is under way.

    Parameters
    ----------
    report
        The run report, which counts them.

    Attributes
    ----------
    saved
        The boundary of the newest checkpoint that was published; 0: none.
    """

    def __init__(self, report: Report, clock: Clock | None = None) -> None:
        self._report = report
        self._clock = clock or MonotonicClock()
        self._current: BackgroundSnapshot | None = None
        self.saved = 0
        self._blocked_s = 0.0
        self._hasty: set[str] = set()
        self._hooked = False

    @property
    def under_way(self) -> bool:
        """True if a checkpoint was begun and is not finished."""
        return self._current is not None

    def begin(self, start: Start) -> bool:
        """Finish the previous checkpoint and begin a new one. Return False if none can be taken here.

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
        """Help the checkpoint under way on, without waiting: publish it if all of it is copied.

        For the main thread, between two batches.
        """
        current = self._current
        if current is not None and current.copied:
            with _without_handlers():
                current.check()
                current.publish_soon()
                if current.over:
                    self.settle()

    def settle(self, *, keep: bool = True) -> None:
        """Finish the checkpoint under way: publish it, or give it up if it failed or ``keep`` is False.

        The store may be used afterwards.
        """
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
            self.saved = current.boundary
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
        """Wait until the checkpoint under way is copied: the optimizer is about to change its tensors."""
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
        """Forget the checkpoint under way in a fork, which has neither its threads nor the store."""
        self._current = None


def _without_handlers() -> AbstractContextManager[None]:
    """Hold back the script's signal handlers inside the block, if this is the main thread, which runs them.

    A handler that raises would leave the store with a snapshot that is never finished. A handler that
    suspends the job would wait for the checkpoint that it has interrupted.
    """
    main = threading.current_thread() is threading.main_thread()
    return undisturbed() if main else nullcontext()


def obstacle(attached: Attached | None, job: str) -> str | None:
    """Return why a process of ``job`` can take no checkpoint, as a line for the user; None if it can."""
    if attached is None:
        return "no checkpoints: the script names no state to save; see gpuslice.attach"
    if not job:
        return "no checkpoints: the job has no name to find them by; give one with --job"
    return None


class Schedule:
    """The schedule of checkpoints: one at every Nth boundary, or at the next one that allows a restart.

    Parameters
    ----------
    checkpoints
        Takes the checkpoints.
    boundaries
        The process's counter, which calls ``at_boundary``.
    every
        The number N.
    obstacle
        Returns why this process can take no checkpoint, as a line for the user; None if it can.
    start
        Starts a snapshot, as for ``Checkpoints.begin``.
    hopeless
        Returns True if no checkpoint could be begun here, and none can be at the next boundary either.
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
        """Begin a checkpoint if one is due, and help on the one that is under way."""
        self._checkpoints.advance()
        if boundary >= self._due and self._begin():
            self._due = (boundary // self._every + 1) * self._every
        busy = self._checkpoints.under_way or boundary >= self._due
        self._boundaries.save_at = boundary + 1 if busy else self._due

    def _begin(self) -> bool:
        """Try to begin the checkpoint that is due. Return False to try it again at the next boundary."""
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
