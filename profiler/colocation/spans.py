"""Spans of time, and the progress of a job in them with halts left out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Column = NDArray[np.float64]
#: Begin and end, in seconds of the host's monotonic clock.
Span = tuple[float, float]


def intersection(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """Return the times that lie in a span of both lists."""
    both = [(max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other]
    return sorted((begin, end) for begin, end in both if begin < end)


def without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """Return the parts of ``spans`` that lie in none of ``holes``."""
    cuts = [-np.inf, *(edge for hole in sorted(holes) for edge in hole), np.inf]
    return intersection(spans, list(zip(cuts[::2], cuts[1::2], strict=True)))


def total_s(spans: Sequence[Span]) -> float:
    """Return the total length of ``spans``."""
    return float(sum(end - begin for begin, end in spans))


def active(times: ArrayLike, halts: Sequence[Span]) -> Column:
    """Return ``times`` on a clock that stands still during ``halts``."""
    at = np.asarray(times, dtype=np.float64)
    gone = sum((np.clip(at - begin, 0.0, end - begin) for begin, end in halts), np.zeros_like(at))
    return np.asarray(at - gone, dtype=np.float64)


def progress(edges: Column, spans: ArrayLike) -> float:
    """Return how many steps that end at ``edges`` lie in ``spans``, shape (n, 2), with parts of steps."""
    if edges.size < 2:
        return 0.0
    counts = np.interp(np.asarray(spans, dtype=np.float64).reshape(-1, 2), edges, np.arange(edges.size))
    return float((counts[:, 1] - counts[:, 0]).sum())
