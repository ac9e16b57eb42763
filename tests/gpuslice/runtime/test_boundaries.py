"""Which moments are boundaries, and when the controller is called."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from gpuslice.runtime import boundaries
from gpuslice.runtime.boundaries import (
    EVALUATION_CALLS,
    LOADERLESS_STEPS,
    NEVER,
    STEPLESS_BACKWARDS,
    BoundaryCounter,
)

from ...patience import PATIENCE_S


class Recorder:
    """A controller that notes where it was called and asks for nothing more."""

    def __init__(self, counter: BoundaryCounter, stop_at: int = 1) -> None:
        self.called_at: list[int] = []
        self._counter = counter
        counter.controller = self
        counter.stop_at = stop_at

    def at_boundary(self, boundary: int) -> tuple[int, ...]:
        self.called_at.append(boundary)
        return ()


@pytest.fixture
def counter() -> BoundaryCounter:
    return BoundaryCounter()


def test_a_fetch_is_a_boundary_before_the_batch(counter: BoundaryCounter) -> None:
    recorder = Recorder(counter, stop_at=2)
    for _ in range(3):
        counter.fetching()
    assert counter.count == 3
    assert recorder.called_at == [2, 3]  # asked for nothing else, so it is called until it does


def test_a_profile_is_recorded_beside_what_others_do_at_boundaries(counter: BoundaryCounter) -> None:
    calls: list[tuple[str, int]] = []
    counter.recorder = lambda boundary: calls.append(("recorder", boundary))
    counter.call_at(2, lambda boundary: calls.append(("callback", boundary)))
    for _ in range(3):
        counter.fetching()
    assert calls == [("recorder", 1), ("recorder", 2), ("callback", 2), ("recorder", 3)]


def test_each_callback_is_called_once_where_it_was_last_asked_for(counter: BoundaryCounter) -> None:
    calls: list[tuple[str, int]] = []

    def again(boundary: int) -> None:
        calls.append(("again", boundary))
        if boundary < 4:
            counter.call_at(boundary + 1, again)

    def once(boundary: int) -> None:
        calls.append(("once", boundary))

    counter.call_at(1, once)
    counter.call_at(3, once)
    counter.call_at(3, again)
    for _ in range(6):
        counter.fetching()
    assert calls == [("once", 3), ("again", 3), ("again", 4)]
    assert counter.callback_at == NEVER


def test_the_controller_is_left_alone_before_its_boundary(counter: BoundaryCounter) -> None:
    recorder = Recorder(counter, stop_at=NEVER)
    for _ in range(100):
        counter.fetching()
    assert recorder.called_at == []


def test_steps_are_no_boundaries_beside_a_dataloader(counter: BoundaryCounter) -> None:
    for _ in range(5):
        counter.fetching()
        counter.stepped()
        counter.stepped()
    assert (counter.count, counter.steps) == (5, 10)


def test_steps_are_boundaries_without_a_dataloader(counter: BoundaryCounter) -> None:
    for _ in range(5):
        counter.stepped()
    assert (counter.count, counter.steps) == (5, 5)


def test_a_loop_that_stops_using_its_dataloader_goes_on_having_boundaries(counter: BoundaryCounter) -> None:
    counter.fetching()
    for _ in range(LOADERLESS_STEPS):
        counter.stepped()
    assert counter.count == 1
    counter.stepped()
    counter.stepped()
    assert counter.count == 3


def test_backward_passes_are_boundaries_without_loader_and_optimizer(counter: BoundaryCounter) -> None:
    for _ in range(5):
        counter.backward_ended()
    assert (counter.count, counter.steps, counter.amid_graphs) == (5, 0, True)


@pytest.mark.parametrize("better", ["fetching", "stepped", "expect_steps"])
def test_backward_passes_are_none_beside_something_better(counter: BoundaryCounter, better: str) -> None:
    getattr(counter, better)()
    before = counter.count
    for _ in range(STEPLESS_BACKWARDS):
        counter.backward_ended()
    assert counter.count == before
    counter.backward_ended()
    assert counter.count == before + 1
    counter.fetching()
    counter.backward_ended()
    assert (counter.count, counter.amid_graphs) == (before + 2, False)


def test_calls_are_boundaries_where_nothing_better_is(counter: BoundaryCounter) -> None:
    for _ in range(EVALUATION_CALLS + 3):
        counter.calling()
    assert counter.count == 3


@pytest.mark.parametrize("better", ["fetching", "stepped", "backward_ended"])
def test_calls_do_not_count_any_more_after_something_better(counter: BoundaryCounter, better: str) -> None:
    counter.calling()
    assert counter.counts_module_calls
    getattr(counter, better)()
    assert not counter.counts_module_calls
    counter.expect_calls()
    assert counter.counts_module_calls


def test_a_step_of_compiled_code_is_counted_at_what_comes_next(counter: BoundaryCounter) -> None:
    for _ in range(3):
        counter.backward_ended()
        counter.compiled_step = True
    assert counter.steps == 2
    assert counter.settle_steps()
    assert (counter.steps, counter.settle_steps()) == (3, False)


def test_a_step_of_compiled_code_is_counted_at_a_boundary_of_the_scripts_own(
    counter: BoundaryCounter,
) -> None:
    for steps in (1, 2, 3):
        counter.compiled_step = True
        counter.mark()
        assert (counter.steps, counter.count) == (steps, steps)


def test_after_the_first_explicit_boundary_only_those_count(counter: BoundaryCounter) -> None:
    recorder = Recorder(counter)
    counter.fetching()
    counter.mark()
    counter.fetching()
    counter.stepped()
    counter.mark()
    assert counter.count == 3
    assert recorder.called_at == [1, 2, 3]
    assert counter.explicit


def test_skipping_counts_nothing(counter: BoundaryCounter) -> None:
    with counter.skipping():
        counter.fetching()
    assert counter.count == 0
    counter.fetching()
    assert counter.count == 1


def test_skipping_does_not_bring_the_hooks_back_into_an_explicit_loop(counter: BoundaryCounter) -> None:
    counter.mark()
    with counter.skipping():
        pass
    counter.fetching()
    assert counter.count == 1


def test_a_counter_without_controller_never_parks(counter: BoundaryCounter) -> None:
    recorder = Recorder(counter)
    counter.forget_controller()
    counter.fetching()
    assert counter.count == 1
    assert recorder.called_at == []


def test_a_boundary_may_be_marked_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "counter", BoundaryCounter())
    thread = threading.Thread(target=boundaries.boundary)
    thread.start()
    thread.join()
    assert boundaries.counter.count == 1


def test_boundary_costs_a_script_outside_gpuslice_no_torch() -> None:
    code = "import gpuslice, sys; gpuslice.boundary(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode == 0
