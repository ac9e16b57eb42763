"""A script that passes no boundary is named: where it is, and what to do."""

from __future__ import annotations

import inspect
import sys
import threading
from types import FrameType

import pytest
import torch

from gpuslice.agent.boundary_watchdog import PATIENCE_S, BoundaryWatchdog
from gpuslice.checkpoint.discover.thread_stacks import stack
from gpuslice.runtime.boundaries import BoundaryCounter


class Bench:
    """A watch with a clock that the test moves, over a main thread that stands in this file."""

    def __init__(self) -> None:
        self.counter = BoundaryCounter()
        self.asked = False
        self.pending_s = 0.0
        self.told: list[str] = []
        self.watch = BoundaryWatchdog(
            self.counter, lambda: self.asked, lambda *lines: self.told.extend(lines), lambda: self.pending_s
        )
        self.now_s = self.busy_s = 0.0

    def look(self, *, after_s: float = 0.0, busy: float = 1.0, frame: FrameType | None = None) -> str:
        self.now_s += after_s
        self.busy_s += busy * after_s
        frames = list(stack(frame or sys._getframe(1)))
        self.watch.look(self.now_s, self.busy_s, lambda: frames)
        return self.watch.stuck


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_no_thread_is_left_once_it_is_stopped(bench: Bench) -> None:
    before = set(threading.enumerate())
    bench.watch.start()
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["gpuslice-watch"]
    bench.watch.stop()
    assert set(threading.enumerate()) == before
    BoundaryWatchdog(bench.counter).stop()


def test_a_script_that_computes_without_a_boundary_is_named_with_its_line(bench: Bench) -> None:
    assert torch  # this module knows it
    assert bench.look() == ""
    assert bench.look(after_s=PATIENCE_S - 1) == ""
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    stuck = bench.look(after_s=1)
    assert stuck == f"at {__file__}:{line}, in {inspect.currentframe().f_code.co_name}"  # type: ignore[union-attr]
    what, remedy = bench.told
    assert stuck in what
    assert "gpuslice.boundary()" in remedy
    bench.look(after_s=1)
    assert len(bench.told) == 2  # once


def test_a_boundary_ends_it(bench: Bench) -> None:
    bench.look()
    assert bench.look(after_s=PATIENCE_S)
    bench.counter.backward_ended()
    assert bench.look(after_s=1) == ""
    assert bench.look(after_s=PATIENCE_S - 1) == ""


def test_who_waits_for_others_is_not_named(bench: Bench) -> None:
    bench.look()
    for _ in range(5):
        assert bench.look(after_s=PATIENCE_S, busy=0.01) == ""
    assert bench.told == []


def test_who_is_asked_to_park_is_named_whatever_it_does(bench: Bench) -> None:
    bench.look()
    bench.look(after_s=PATIENCE_S - 1, busy=0.0)
    bench.asked = True
    assert bench.look(after_s=1, busy=0.0) == ""
    assert bench.look(after_s=PATIENCE_S, busy=0.0)
    assert "asked to park" in bench.told[0]
    bench.asked = False
    bench.counter.fetching()
    assert bench.look(after_s=1) == ""


def test_a_script_that_passes_no_boundary_without_a_pending_collective_is_named_once(bench: Bench) -> None:
    bench.look()
    for bench.pending_s in (PATIENCE_S - 1, PATIENCE_S, PATIENCE_S + 1):
        bench.counter.fetching()
        stuck = "without a pending collective" if bench.pending_s >= PATIENCE_S else ""
        assert bench.look(after_s=1) == stuck
    what, remedy = bench.told
    assert "no boundary without a pending collective" in what
    assert "async_op=True" in remedy
    bench.pending_s = 0.0
    bench.counter.fetching()
    assert bench.look(after_s=1) == ""


def test_a_parked_job_is_not_named(bench: Bench) -> None:
    def at_boundary() -> FrameType:
        frames = {}
        exec("import sys\nframe = sys._getframe()", {"__name__": "gpuslice.agent.agent"}, frames)  # noqa: S102
        return frames["frame"]  # type: ignore[no-any-return]

    bench.look()
    bench.asked = True
    for _ in range(3):
        assert bench.look(after_s=PATIENCE_S, frame=at_boundary()) == ""


def test_an_import_is_no_training(bench: Bench) -> None:
    def importing() -> FrameType:
        frames = {}
        exec("import sys\nframe = sys._getframe()", {"__name__": "importlib._bootstrap"}, frames)  # noqa: S102
        return frames["frame"]  # type: ignore[no-any-return]

    bench.look(frame=importing())
    assert bench.look(after_s=PATIENCE_S, frame=importing()) == ""
