"""Counts boundaries: the points of a script where its job may park. ``boundary()`` marks one explicitly.

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
#: With more optimizer steps than this without a new batch, a loop counts as one without a DataLoader
#: (a GAN's critic steps several times on one batch).
LOADERLESS_STEPS = 16
#: With more backward passes than this without a batch or a step, a loop counts as one without an optimizer
#: (an attack on one batch, gradients accumulated over many). Before any batch or step, the first pass counts.
STEPLESS_BACKWARDS = 64
#: With more module calls than this without a batch, step or pass, a loop counts as one that only evaluates.
EVALUATION_CALLS = 16


class Controller(Protocol):
    """The interface of what decides at a boundary whether the job parks."""

    def at_boundary(self, boundary: int) -> Sequence[int]:
        """Act at a boundary, in the thread that trains. Return the signals to deliver (``ending.deliver``).

        Unless the controller sets ``stop_at`` anew, it is called again at the next boundary.
        """
        ...


class BoundaryCounter:
    """The counter of one process's boundaries. It calls the controller at the boundaries that it asked for.

    Attributes
    ----------
    count
        Number of boundaries so far, and so of the latest one. A job that continues from a snapshot sets it.
    steps
        Number of optimizer steps so far.
    thread
        The thread whose boundaries count. The hooks ask it before they note anything.
    stop_at
        The first boundary that concerns the controller. Other threads may set it.
    explicit
        True if the script marks its boundaries itself. The hooks then count none.
    amid_graphs
        True if the latest boundary is at a backward pass or a module call: graphs may still be in use.
    counts_module_calls
        True if there was no batch, step or backward pass since the script began to evaluate.
    went_on_from
        The boundary of the former process's snapshot that this process went on from; 0 without a snapshot.
    hooked
        True if DataLoaders report their fetches by themselves.
    compiled_step
        Set to True by compiled code whenever it has made an optimizer step.
    save_at, saver
        The first boundary at which to call ``saver``, after the controller, and the saver. It takes
        checkpoints and sets ``save_at`` anew.
    recorder
        Called at every boundary, before all others, if a profile is recorded.
    callback_at
        The first boundary at which a callback of `call_at` is due.
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
        """Note that a DataLoader is about to fetch a batch. Return the signals to deliver."""
        self.settle_steps()
        self._steps_since_fetch = self._backwards_since_step = 0
        self.counts_module_calls = False
        return self._cross() if self._by_hooks else ()

    def stepped(self) -> Sequence[int]:
        """Note that an optimizer step has ended, outside a backward pass. Return the signals to deliver."""
        self.settle_steps()
        self._count_step()
        return self._cross() if self._loaderless and self._by_hooks else ()

    def settle_steps(self) -> bool:
        """Count the step that compiled code has made since the last call. Return True if there was one."""
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
        """Note that an outermost backward pass has ended. Return the signals to deliver."""
        stepped = self.compiled_step and self.settle_steps()
        self._backwards_since_step += 1
        self.counts_module_calls = False
        counts = self._backwards_since_step > STEPLESS_BACKWARDS or (stepped and self._loaderless)
        return self._cross(True) if counts and self._by_hooks else ()

    def expect_steps(self) -> None:
        """Note that there is an optimizer: backward passes before its first step are no boundaries yet."""
        self._backwards_since_step = 0

    def expect_calls(self) -> None:
        """Note that the script begins to evaluate. Module calls count until a batch, step or pass."""
        self._calls_since = 0
        self.counts_module_calls = True

    def calling(self) -> Sequence[int]:
        """Note that an outermost module is about to be called. Return the signals to deliver."""
        self._calls_since += 1
        counts = self._calls_since > EVALUATION_CALLS
        return self._cross(True) if counts and self._by_hooks else ()

    def mark(self) -> Sequence[int]:
        """Count a boundary that the script marks, and from now on only such. Return signals to deliver."""
        self.settle_steps()
        self.leave_to_script()
        return self._cross()

    def pass_another(self) -> Sequence[int]:
        """Count a boundary that a trainer marks, beside those of the hooks. Return signals to deliver."""
        self.settle_steps()
        return self._cross()

    def leave_to_script(self) -> None:
        """Count only boundaries that the script marks itself, from now on."""
        self.explicit = True
        self._by_hooks = False

    def forget_controller(self) -> None:
        """Drop the controller and all callbacks: go on counting, but never park or save again."""
        self.controller = self.saver = self.recorder = None
        self.stop_at = self.save_at = self.callback_at = NEVER
        self._callbacks.clear()

    def call_at(self, boundary: int, callback: Callable[[int], None]) -> None:
        """Have ``callback`` called once, at the first boundary from number ``boundary`` on.

        A later request for the same callback replaces this one.
        """
        self._callbacks[callback] = boundary
        self.callback_at = min(self._callbacks.values())

    def call_at_next(self, callback: Callable[[int], None]) -> None:
        """Have ``callback`` called once, at the next boundary."""
        self.call_at(self.count + 1, callback)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Inside the block, ignore the hooks: they neither count boundaries nor park the job."""
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


#: The counter of this process. It only counts until a runtime gives it a controller.
counter = BoundaryCounter()


def boundary() -> None:
    """Mark a boundary between two mini-batches in a custom training loop.

    Once a script has called this, only its own calls are boundaries. Outside ``gpuslice run`` it does nothing
    but count. If several threads train, the boundaries of one of them count.
    """
    if counter.thread.trains():
        deliver(counter.mark())


def skipping() -> AbstractContextManager[None]:
    """Inside the block, count no boundaries: after a restart, the script consumes batches there again."""
    return counter.skipping()
