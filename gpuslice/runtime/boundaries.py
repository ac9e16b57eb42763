"""Boundaries: where the job may park, counted; and ``boundary()``, their explicit form.

docs/run.md says which moments are boundaries and how they are numbered. Counting is the hot path:
one addition and one comparison per boundary. Nothing here knows torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from gpuslice.runtime.ending import deliver
from gpuslice.runtime.threads.training_thread import TrainingThread

#: A ``stop_at`` that no boundary reaches.
NEVER = sys.maxsize
#: After how many optimizer steps without a new batch a loop counts as one without a DataLoader
#: (a GAN's critic steps several times on one batch).
LOADERLESS_STEPS = 16
#: After how many backward passes without a batch or a step it counts as one without an optimizer, too
#: (an attack on one batch, gradients accumulated over many), unless it has had neither so far.
STEPLESS_BACKWARDS = 64
#: After how many calls of modules without any of these it counts as one that only evaluates.
EVALUATION_CALLS = 16


class Controller(Protocol):
    """Decides what happens at the boundaries it asked for by setting ``BoundaryCounter.stop_at``."""

    def at_boundary(self, boundary: int) -> Sequence[int]:
        """Called in the thread that trains; sets ``stop_at`` anew, else it is called again at the next one.

        Returns the signals whose handlers could not run meanwhile (``ending.deliver``).
        """
        ...


class BoundaryCounter:
    """Counts the boundaries of one process and calls the controller at those it asked for.

    Attributes
    ----------
    count
        Boundaries passed so far; the number of the latest one. A job that continues from a snapshot sets it.
    steps
        Optimizer steps done.
    thread
        The thread whose boundaries these are. The hooks ask it before they tell of anything.
    stop_at
        The first boundary that concerns the controller. Other threads may set it.
    explicit
        Whether the script marks its boundaries itself; then the hooks count none.
    amid_graphs
        Whether the latest boundary is of a backward pass or a call: graphs may be alive that go on.
    counts_module_calls
        Whether there was no batch, step or backward pass since the script began to evaluate.
    went_on_from
        Where the snapshot of a former process was taken that this one has gone on from; 0 without one.
    hooked
        Whether DataLoaders tell of their fetches by themselves.
    compiled_step
        Set by compiled code each time that it has made an optimizer step.
    save_at, saver
        The first boundary that concerns ``saver``, and whom to call there (after the controller): it takes
        checkpoints and sets ``save_at`` anew.
    recorder
        Called at every boundary, before all others, if a profile is recorded.
    callback_at
        The first boundary at which one of those is called that `call_at` was given.
    """

    __slots__ = (
        "_backwards_since_step",
        "_by_hooks",
        "_callbacks",
        "_calls_since",
        "_steps_since_fetch",
        "amid_graphs",
        "callback_at",
        "compiled_step",
        "controller",
        "count",
        "counts_module_calls",
        "explicit",
        "hooked",
        "recorder",
        "save_at",
        "saver",
        "steps",
        "stop_at",
        "thread",
        "went_on_from",
    )

    def __init__(self) -> None:
        self.count = self.went_on_from = 0
        self.steps = 0
        self.thread = TrainingThread()
        self.stop_at = NEVER
        self.explicit = False
        self.hooked = False
        self.controller: Controller | None = None
        self.save_at = NEVER
        self.saver: Callable[[int], None] | None = None
        self.recorder: Callable[[int], None] | None = None
        self.callback_at = NEVER
        self._callbacks: dict[Callable[[int], None], int] = {}
        self._by_hooks = True
        self._steps_since_fetch = LOADERLESS_STEPS
        self._backwards_since_step = STEPLESS_BACKWARDS
        self._calls_since = 0
        self.counts_module_calls = True
        self.compiled_step = False
        self.amid_graphs = False

    @property
    def trained(self) -> bool:
        """Return True if the script has made an optimizer step, or ends a backward pass here."""
        return bool(self.steps) or (self.amid_graphs and not self.counts_module_calls)

    def fetching(self) -> Sequence[int]:
        """A DataLoader is about to fetch a batch; returns the signals to deliver."""
        self.settle_steps()
        self._steps_since_fetch = self._backwards_since_step = 0
        self.counts_module_calls = False
        return self._cross() if self._by_hooks else ()

    def stepped(self) -> Sequence[int]:
        """An optimizer step has ended, outside backward; the signals to deliver."""
        self.settle_steps()
        self._count_step()
        return self._cross() if self._loaderless and self._by_hooks else ()

    def settle_steps(self) -> bool:
        """Count the step that compiled code has made since this was last asked; whether there was one."""
        settled, self.compiled_step = self.compiled_step, False
        if settled:
            self._count_step()
        return settled

    def _count_step(self) -> None:
        self.steps += 1
        self._steps_since_fetch += 1
        self._backwards_since_step = 0
        self.counts_module_calls = False

    @property
    def _loaderless(self) -> bool:
        return self._steps_since_fetch > LOADERLESS_STEPS

    def backward_ended(self) -> Sequence[int]:
        """An outermost backward pass has ended; returns the signals to deliver."""
        stepped = self.compiled_step and self.settle_steps()
        self._backwards_since_step += 1
        self.counts_module_calls = False
        counts = self._backwards_since_step > STEPLESS_BACKWARDS or (stepped and self._loaderless)
        return self._cross(True) if counts and self._by_hooks else ()

    def expect_steps(self) -> None:
        """There is an optimizer, so the first backward passes come before its first step."""
        self._backwards_since_step = 0

    def expect_calls(self) -> None:
        """The script begins to evaluate: calls of modules count, until something better does."""
        self._calls_since = 0
        self.counts_module_calls = True

    def calling(self) -> Sequence[int]:
        """An outermost module is about to be called; returns the signals to deliver."""
        self._calls_since += 1
        counts = self._calls_since > EVALUATION_CALLS
        return self._cross(True) if counts and self._by_hooks else ()

    def mark(self) -> Sequence[int]:
        """The script says that this is a boundary, and from now on only it does; the signals to deliver."""
        self.settle_steps()
        self.leave_to_script()
        return self._cross()

    def leave_to_script(self) -> None:
        """From now on only the script says what is a boundary."""
        self.explicit = True
        self._by_hooks = False

    def forget_controller(self) -> None:
        """Go on counting, but never park or save again."""
        self.controller = self.saver = self.recorder = None
        self.stop_at = self.save_at = self.callback_at = NEVER
        self._callbacks.clear()

    def call_at(self, boundary: int, callback: Callable[[int], None]) -> None:
        """Have it called once, at the first boundary from that one on. A later call replaces this one."""
        self._callbacks[callback] = boundary
        self.callback_at = min(self._callbacks.values())

    def call_at_next(self, callback: Callable[[int], None]) -> None:
        """The same, at the next one."""
        self.call_at(self.count + 1, callback)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """While this lasts the hooks neither count nor park."""
        before, self._by_hooks = self._by_hooks, False
        try:
            yield
        finally:
            self._by_hooks = before and not self.explicit

    def _cross(self, amid_graphs: bool = False) -> Sequence[int]:
        self.count += 1
        self.amid_graphs = amid_graphs
        late: Sequence[int] = ()
        if self.recorder is not None:
            self.recorder(self.count)
        if self.count >= self.stop_at and self.controller is not None:
            late = self.controller.at_boundary(self.count)
        if self.count >= self.save_at and self.saver is not None:
            self.saver(self.count)
        if self.count >= self.callback_at:
            self._call_back()
        return late

    def _call_back(self) -> None:
        due = [callback for callback, at in self._callbacks.items() if at <= self.count]
        for callback in due:
            del self._callbacks[callback]
        self.callback_at = min(self._callbacks.values(), default=NEVER)
        for callback in due:
            callback(self.count)


#: The counter of this process. It costs nothing until a runtime gives it a controller.
counter = BoundaryCounter()


def boundary() -> None:
    """Mark a boundary between two mini-batches in a custom training loop.

    Once a script has called this, only its own calls are boundaries. Outside ``gpuslice run`` it does nothing
    but count. If several threads train, the boundaries of one of them count.
    """
    if counter.thread.trains():
        deliver(counter.mark())


def skipping() -> AbstractContextManager[None]:
    """Batches consumed in here are being consumed again after a restart: they are no boundaries."""
    return counter.skipping()
