"""What other threads have the main thread do."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import cast

import pytest

from gpuslice.errors import SuspendRefusedError
from gpuslice.runtime.threads.main_thread import CALL, MainThread, MainThreadStuckError
from gpuslice.runtime.threads.thread_gate import ThreadGate

from ....patience import PATIENCE_S


class NoGate:
    def standing(self) -> nullcontext[None]:
        return nullcontext()


def make(patience_s: float) -> MainThread:
    return MainThread(lambda: cast(ThreadGate, NoGate()), patience_s)


@pytest.fixture
def main_thread() -> Iterator[MainThread]:
    found, before = make(PATIENCE_S), signal.getsignal(CALL)
    found.listen()
    yield found
    signal.signal(CALL, before)


class Asking:
    """Another thread, which has the main one do something."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.answer: object = None
        self._act = act
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="training")
        self._thread.start()

    def _ask(self) -> None:
        try:
            self.answer = self._act()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.answer = error
        finally:
            self._answered.set()

    @property
    def over(self) -> bool:
        return self._answered.is_set()

    def join(self) -> object:
        assert self._answered.wait(PATIENCE_S)
        self._thread.join()
        return self.answer


def test_it_answers_while_it_waits_for_the_thread(main_thread: MainThread) -> None:
    assert Asking(partial(main_thread.run, threading.get_ident)).join() == threading.get_ident()


def test_it_answers_while_it_is_busy_with_something_else(main_thread: MainThread) -> None:
    asking = Asking(partial(main_thread.run, threading.get_ident))
    while not asking.over:
        time.sleep(0.001)
    assert asking.join() == threading.get_ident()


def test_an_error_is_that_of_the_thread_that_asked(main_thread: MainThread) -> None:
    def fail() -> None:
        raise SuspendRefusedError("no", "wait")

    assert isinstance(Asking(partial(main_thread.run, fail)).join(), SuspendRefusedError)


def test_what_ends_the_script_ends_both_threads(main_thread: MainThread) -> None:
    def leave() -> None:
        raise SystemExit(5)

    may_ask = threading.Event()
    asking = Asking(lambda: (may_ask.wait(PATIENCE_S), main_thread.run(leave)))

    def wait() -> None:
        may_ask.set()
        asking.join()

    with pytest.raises(SystemExit) as ended:
        wait()
    assert (ended.value.code, cast(SystemExit, asking.join()).code) == (5, 5)


def test_it_is_asked_again_after_a_handler_that_saves_a_checkpoint(main_thread: MainThread) -> None:
    order: list[str] = []

    def save(number: int, frame: object) -> None:
        nonlocal asking
        asking = Asking(partial(main_thread.run, partial(order.append, "parked")))
        for _ in range(20):
            time.sleep(0.01)
        order.append("saved")

    asking: Asking | None = None
    before = signal.signal(signal.SIGUSR1, save)
    try:
        signal.raise_signal(signal.SIGUSR1)
        assert asking is not None
        asking.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert order == ["saved", "parked"]


def test_a_main_thread_that_does_not_react_is_named_and_not_waited_for_again() -> None:
    before = signal.signal(CALL, lambda number, frame: None)  # the script's own
    try:
        main_thread = make(0.1)
        main_thread.listen()
        for _ in range(2):
            error = Asking(partial(main_thread.run, threading.get_ident)).join()
            assert isinstance(error, MainThreadStuckError)
            assert "thread 'training' trains" in error.message
    finally:
        signal.signal(CALL, before)
