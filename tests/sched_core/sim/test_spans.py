"""Columns of spans."""

from __future__ import annotations

import numpy as np
import pytest

from gpuslice.sched_core.sim.spans import Span, Spans

FOUND = [Span(1, 0.0, 2.5, (3, 0)), Span(0, 1.0, 4.0, (7,)), Span(1, 4.0, 5.0, (1, 2, 9))]


def columns() -> Spans:
    spans = Spans()
    for span in FOUND:
        spans.add(span.job, span.start_s, span.end_s, span.devices)
    return spans


def test_spans_come_back_as_they_were_added() -> None:
    assert list(columns()) == FOUND
    assert columns()[-1] == FOUND[-1]
    assert columns() != Spans()
    with pytest.raises(IndexError):
        columns()[3]


def test_many_at_once_are_what_they_are_one_by_one() -> None:
    spans = Spans()
    spans.add(1, 0.0, 2.5, (3, 0))
    spans.extend(
        np.array([0, 1], np.int32),
        np.array([1.0, 4.0]),
        np.array([4.0, 5.0]),
        np.array([1, 3]),
        np.array([7, 1, 2, 9], np.int32),
    )
    assert spans == columns()


def test_each_jobs_spans_in_their_order() -> None:
    order, bounds = columns().by_job(3)
    assert order.tolist() == [1, 0, 2]
    assert bounds.tolist() == [0, 1, 3, 3]
