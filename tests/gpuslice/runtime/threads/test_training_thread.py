"""Which thread's batches and steps count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuslice.runtime.threads.training_thread import TrainingThread


@pytest.fixture
def thread() -> TrainingThread:
    return TrainingThread()


@pytest.fixture
def other() -> Iterator[Callable[[Callable[[], bool]], bool]]:
    """Asks something in another thread, always the same one."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda ask: pool.submit(ask).result()


Ask = Callable[[Callable[[], bool]], bool]


def test_until_somebody_trains_the_first_that_fetches_counts(thread: TrainingThread, other: Ask) -> None:
    assert other(thread.may_train)
    assert not thread.may_train(), "the main thread looks at data, and the other one was first"
    assert thread.trains(), "who trains is the one"
    assert not other(thread.may_train)


def test_a_thread_that_trains_alone_counts_from_its_first_step(thread: TrainingThread, other: Ask) -> None:
    assert thread.may_train()
    assert other(thread.trains)
    assert not thread.may_train()
    assert not thread.shared


def test_a_thread_follows_another_that_has_ended_at_once(thread: TrainingThread, other: Ask) -> None:
    first = threading.Thread(target=thread.trains)
    first.start()
    first.join()
    assert other(thread.may_train)


def test_a_thread_follows_another_that_trains_no_more_at_its_second_step(
    thread: TrainingThread, other: Ask
) -> None:
    assert thread.trains()
    assert [other(thread.trains) for _ in range(3)] == [False, True, True]
    assert not thread.shared


def test_two_threads_that_train_by_turns_are_noticed(thread: TrainingThread, other: Ask) -> None:
    assert [thread.trains(), other(thread.trains), thread.trains(), other(thread.trains)] == [
        True,
        False,
        True,
        False,
    ]
    assert thread.shared
