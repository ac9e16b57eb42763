"""Ctrl-C at any line of the simulator: what it returns is as far as it came, and whole."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from gpuslice.sched_core.policies.las import LeastAttained
from gpuslice.sched_core.policy import Plan, View
from gpuslice.sched_core.sim import engine
from gpuslice.sched_core.sim.interrupts import Interrupts
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.sim.run import Request
from gpuslice.sched_core.traces.trace import Trace

#: Whose lines are counted.
FOLDER = str(Path(engine.__file__).parent)
ROWS = [(0.0, 1, 300.0), (20.0, 2, 250.0), (40.0, 1, 100.0), (500.0, 2, 130.0), (510.0, 1, 70.0)]


def request() -> Request:
    submit, demand, duration = zip(*ROWS, strict=True)
    trace = Trace(list("abcde"), submit, demand, duration)
    return Request(trace, "1x2", "las", keep_spans=True, engine="plain")


def interrupted(at: int) -> tuple[Outcome, int]:
    """The outcome if Ctrl-C comes before that line; and how many lines there were."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            lines += 1
            if lines == at:
                signal.raise_signal(signal.SIGINT)
        return trace

    simulation = request().prepare()
    former = sys.gettrace()
    with Interrupts():  # before the simulator's own, it ends nothing
        sys.settrace(trace)
        try:
            return simulation.run(), lines
        finally:
            sys.settrace(former)


def test_what_is_known_is_whole_whenever_it_comes() -> None:
    whole, lines = interrupted(0)
    assert whole.complete
    ended = set()
    for at in range(50, lines - 50, lines // 150):
        outcome, _ = interrupted(at)
        assert not outcome.complete
        done = ~np.isnan(outcome.finish_s)
        ended.add(int(done.sum()))
        np.testing.assert_array_equal(outcome.finish_s[done], whole.finish_s[done])
        spans = list(outcome.spans)
        assert spans == list(whole.spans)[: len(spans)]
        for job in np.flatnonzero(done):
            assert [span for span in spans if span.job == job] == [
                span for span in whole.spans if span.job == job
            ]
    assert ended == set(range(len(ROWS) + 1)), "some came early and some late"


def test_a_policy_that_takes_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(self: LeastAttained, view: View) -> Plan:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr(LeastAttained, "plan", plan)
    outcome = request().prepare().run()
    assert (outcome.complete, len(outcome.spans)) == (False, 0)


def test_whoever_listened_before_is_told_and_listens_again() -> None:
    told = []
    former = signal.signal(signal.SIGINT, lambda number, frame: told.append(number))
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
        assert interrupts.came
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, former)
    assert told == [signal.SIGINT] * 2


def test_where_ctrl_c_is_ignored_it_stays_so() -> None:
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)
    assert not interrupts.came
