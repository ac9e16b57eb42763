"""Has the main thread suspend the job, also when another thread trains.

Python runs signal handlers in the main thread, and only there can they be held back while the job's state is
away. A thread that has to park therefore stands still, and has the main thread do the rest. A signal that few
programs use wakes the main thread, wherever it waits: in ``join``, at a queue, in a loop of its own.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType, FrameType
from typing import Generic, TypeVar

from gpuslice.checkpoint.discover.thread_stacks import stack, stack_of
from gpuslice.checkpoint.gate import OWN_PREFIX
from gpuslice.errors import SuspendRefusedError
from gpuslice.runtime.threads.thread_gate import ThreadGate, inside_torch

#: The signal that wakes the main thread. A process without a handler ignores it, and few programs use it.
CALL = signal.SIGURG
#: How long the main thread may take to react before the suspend is refused.
PATIENCE_S = 10.0
_LOOK_AGAIN_S = 0.05
#: Time until a second signal. A signal that comes while the main thread goes back to waiting is noticed only
#: at the next signal: Python looks for signals before it waits, and not as it begins to wait.
_NUDGE_S = 0.05
#: How long a main thread that did not react the last time may take. The training stands still meanwhile.
_ONCE_MORE_S = 0.2
_REMEDY = "have the main thread wait in Python, by thread.join() for instance, or train in the main thread"
_T = TypeVar("_T")


class MainThreadStuckError(SuspendRefusedError):
    """A suspend is refused because the main thread does not react to the thread that trains."""


class _Call(Generic[_T]):
    """A function to be called in the main thread, for a thread that waits for its result."""

    def __init__(self, act: Callable[[], _T]) -> None:
        self._act = act
        self._lock = threading.Lock()
        self.begun = self.withdrawn = False
        self.done = threading.Event()
        self._result: list[_T] = []
        self._error: BaseException | None = None

    def begin(self) -> bool:
        """Mark the call as begun, unless it is withdrawn. Return True if the caller must now perform it."""
        with self._lock:
            first, self.begun = not self.begun and not self.withdrawn, self.begun or not self.withdrawn
        return first

    def withdraw(self) -> bool:
        """Withdraw the call, unless it has begun. Return True if it is withdrawn, and will never begin."""
        with self._lock:
            self.withdrawn = not self.begun
        return self.withdrawn

    def perform(self) -> None:
        """Call the function and keep its result or exception. An exception that ends the script is raised."""
        try:
            self._result.append(self._act())
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self.done.set()

    def result(self) -> _T:
        """Return the function's result, or raise its exception.

        Instead of an exception that ends the script, ``SystemExit`` with its exit status is raised.
        """
        error = self._error
        if error is None:
            return self._result[0]
        if isinstance(error, Exception):
            raise error
        raise SystemExit(error.code if isinstance(error, SystemExit) else 1)


class MainThread:
    """A way for other threads to have functions called in the main thread.

    Parameters
    ----------
    gate
        Returns the thread gate. It must know that a thread which waits here stands still.
    patience_s
        How long a thread waits for the main one to react, in seconds.
    """

    def __init__(self, gate: Callable[[], ThreadGate], patience_s: float = PATIENCE_S) -> None:
        self._gate = gate
        self._patience_s = patience_s
        self._where: tuple[object, ...] | None = None
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._call: _Call[object] | None = None
        self._reacts = True
        self._late: list[int] = []

    def listen(self) -> None:
        """Handle the signal from now on, unless the script uses the signal itself.

        In another thread than the main one this needs the handler of gpuslice's ``sitecustomize``.
        """
        handler = signal.getsignal(CALL)
        if hasattr(handler, "gpuslice_answer"):
            handler.gpuslice_answer = self._answer  # type: ignore[union-attr]
        elif handler in (signal.SIG_DFL, signal.SIG_IGN) and _is_main():
            signal.signal(CALL, lambda number, frame: self._answer(frame))

    def run(self, act: Callable[[], _T]) -> _T:
        """Call ``act`` in the main thread. Return what it returns, or raise what it raises.

        Raises
        ------
        MainThreadStuckError
            If the main thread does not react. ``act`` is not called then, nor later.
        """
        if _is_main():
            return act()
        call = _Call(act)
        with self._gate().standing(), self._one_at_a_time:
            self._call = call  # type: ignore[assignment]
            try:
                self._await(call)
            finally:
                self._call = None
        return call.result()

    def _await(self, call: _Call[_T]) -> None:
        main_thread = threading.main_thread()
        late_s = time.monotonic() + (self._patience_s if self._reacts else _ONCE_MORE_S)
        while not call.begun:
            if time.monotonic() >= late_s and call.withdraw():
                self._reacts = False
                raise self._refusal()
            signal.pthread_kill(main_thread.ident or 0, CALL)
            call.done.wait(_LOOK_AGAIN_S)
        call.done.wait()
        self._reacts = True
        nudge = threading.Timer(_NUDGE_S, signal.pthread_kill, (main_thread.ident or 0, CALL))
        nudge.name, nudge.daemon = f"{OWN_PREFIX}nudge", True
        nudge.start()

    def _answer(self, frame: FrameType | None) -> None:
        """Perform the waiting call in the main thread, unless torch, gpuslice or a handler runs there."""
        call = self._call
        frames = list(stack(frame))
        if call is None or _is_busy(frames) or not call.begin():
            return  # the thread that waits sends the signal again
        self._where = _place(frames)
        del frame, frames  # they would keep their variables alive
        call.perform()
        if self._late:
            late, self._late = self._late, []
            for number in late:
                signal.raise_signal(number)

    def park(self, act: Callable[[], list[int]]) -> list[int]:
        """Run ``act``, which parks the job and returns the signals that were held back meanwhile.

        Returns
        -------
        list of int
            The signals for the caller to `deliver`. Empty in another thread than the main one, where the
            handlers have run already, or run now.
        """
        if _is_main():
            return act()

        def parked() -> None:
            self._late = act()

        self.run(parked)
        return []

    @property
    def stays(self) -> bool:
        """True if the main thread is where it last answered a call, so that it runs no signal handler."""
        return _is_main() or _place(stack_of(threading.main_thread().ident or 0)) == self._where

    @staticmethod
    def _refusal() -> MainThreadStuckError:
        frames = stack_of(threading.main_thread().ident or 0)
        code = frames[0].f_code if frames else None
        where = "has ended" if code is None else f"is at {code.co_filename}:{frames[0].f_lineno}"
        name = threading.current_thread().name
        return MainThreadStuckError(
            f"thread {name!r} trains, and the main thread, which would park, does not react: it {where}",
            _REMEDY,
        )


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _place(frames: Sequence[FrameType]) -> tuple[object, ...]:
    """Return where a thread is: depth of its stack, innermost code, instruction."""
    return (len(frames), frames[0].f_code, frames[0].f_lasti) if frames else ()


def _is_busy(frames: Sequence[FrameType]) -> bool:
    """Return True if the main thread is inside torch, gpuslice or a signal handler.

    A handler may save a checkpoint because the job is told to end. In a parked job it would never finish.
    """
    handlers = _handlers()
    ours = any(str(one.f_globals.get("__name__")).startswith("gpuslice.") for one in frames)
    return ours or inside_torch(frames) or any(one.f_code in handlers for one in frames)


def _handlers() -> set[CodeType]:
    """Return the code of the script's signal handlers."""
    found = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        while isinstance(handler, partial):
            handler = handler.func
        for function in (handler, vars(type(handler)).get("__call__")):
            function = getattr(function, "__func__", function)
            if isinstance(code := getattr(function, "__code__", None), CodeType):
                found.add(code)
    return found
