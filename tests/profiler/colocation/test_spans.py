"""Spans of time."""

from __future__ import annotations

import numpy as np
import pytest

from gpuslice.profiler.colocation.spans import active, intersection, progress, total_s, without


def test_intersection() -> None:
    assert intersection([(0, 4), (6, 9)], [(1, 2), (3, 7), (8, 20)]) == [(1, 2), (3, 4), (6, 7), (8, 9)]
    assert intersection([(0, 1)], [(1, 2)]) == []


def test_without() -> None:
    assert without([(0, 10), (20, 30)], [(2, 4), (9, 21)]) == [(0, 2), (4, 9), (21, 30)]
    assert without([(0, 1)], []) == [(0, 1)]
    assert total_s(without([(0, 10)], [(0, 10)])) == 0.0


def test_a_clock_that_stands_still() -> None:
    halts = [(2.0, 4.0), (6.0, 7.0)]
    assert active([1.0, 2.0, 3.0, 4.0, 5.0, 8.0], halts) == pytest.approx([1.0, 2.0, 2.0, 2.0, 3.0, 5.0])
    assert active([[1.0, 5.0]], halts).shape == (1, 2)


def test_progress_counts_parts_of_steps() -> None:
    edges = np.array([0.0, 1.0, 3.0])
    assert progress(edges, [(0.5, 2.0)]) == pytest.approx(1.0)
    assert progress(edges, []) == 0.0
    assert progress(edges[:1], [(0.0, 1.0)]) == 0.0
