"""Sensitivity curves and pressures: the effect of loads of one kind on a job, and of a job on a load.

A job's pressure of a kind is the intensity of our own load that slows a reference load down as much as the
job does (Bubble-Up, MICRO 2011). The reference is the load at full intensity. Its speed alone is measured
while it loads the job: the job is halted half of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random

import msgspec
import numpy as np
import scipy

from gpuslice.profiler.recorder import Recording

from .spans import Column, Span, active, intersection, progress, total_s, without
from .statistics import Estimate, Samples, estimate

#: Intensities of a load: the share of the time in which it works.
LEVELS = (0.25, 0.5, 1.0)
#: Number of times that the job is halted during a full load.
_HALTS = 4
#: Weight of the certain point: without a load a job keeps its speed.
_SURE = 1e6


class Phase(msgspec.Struct, frozen=True):
    """A part of a stressor's schedule; without a kind it does nothing."""

    kind: str
    level: float
    seconds: float


class Window(msgspec.Struct, frozen=True):
    """A phase of the load as it happened: from ``begun_s`` to ``ended_s``, and the end of each unit."""

    kind: str
    level: float
    begun_s: float
    ended_s: float
    ends_s: list[float]


class StressLog(msgspec.Struct, frozen=True):
    """The record that a load's process writes: its phases as they happened."""

    windows: list[Window]


class Stressed(msgspec.Struct, frozen=True):
    """A load beside a job, or beside the reference load of its kind, in one round.

    Attributes
    ----------
    kind, level
        The load.
    normalized
        Throughput of the job under the load by that right before and after it; ``None`` if the job was being
        started then.
    units_per_second
        Throughput of the load, without the moments in which the job was halted.
    reference
        The reference's throughput, by that while the job was stopped; ``None`` if it never was.
    """

    kind: str
    level: float
    normalized: float | None
    units_per_second: float
    reference: float | None = None


def schedule(kinds: Sequence[str], seconds: float, seed: int) -> list[Phase]:
    """Return all levels of all ``kinds``, in an order given by ``seed``, with a pause around each.

    A full load lasts twice as long: half of it beside the job, half of it alone.
    """
    loads = [Phase(kind, level, seconds * (2 if level == 1.0 else 1)) for kind in kinds for level in LEVELS]
    Random(seed).shuffle(loads)
    pause = Phase("", 0.0, seconds)
    return [pause, *(phase for load in loads for phase in (load, pause))]


def halt_schedule(phases: Sequence[Phase]) -> list[Span]:
    """Return when to halt the job, in seconds since ``phases`` began: half of the time of each full load."""
    spans, begin_s = [], 0.0
    for phase in phases:
        if phase.level == 1.0:
            moment_s = phase.seconds / (2 * _HALTS)
            starts = [begin_s + (2 * number + 1) * moment_s for number in range(_HALTS)]
            spans += [(start_s, start_s + moment_s) for start_s in starts]
        begin_s += phase.seconds
    return spans


def step_edges(recording: Recording) -> Column:
    """Return when the first step begins and when each step ends, on the host's clock."""
    if not recording.interval_s:
        return np.empty(0)
    edges: Column = recording.begun_s + np.concatenate([[0.0], np.cumsum(recording.interval_s)])
    return edges


def recorded_edges(recordings: Iterable[Recording]) -> list[Column]:
    """Return the edges of the steps of each start."""
    return [step_edges(one) for one in recordings]


def unit_edges(log: StressLog) -> list[Column]:
    """Return the edges of a stressor's units, in place of a job's steps."""
    return [np.array(window.ends_s, dtype=np.float64) for window in log.windows if window.kind]


def stressed(edges: Sequence[Column], log: StressLog, halts: Sequence[Span] = ()) -> tuple[Stressed, ...]:
    """Return the effect of each load of ``log`` on the job with steps at ``edges``, and of the job on it.

    Parameters
    ----------
    halts
        When the job was halted.
    """
    found = []
    own = [active(one, halts) for one in edges]
    bounds = active([(window.begun_s, window.ended_s) for window in log.windows], halts).reshape(-1, 2)
    rates = [_rate(own, (begin, end)) for begin, end in bounds]
    for index, window in enumerate(log.windows):
        if not window.kind:
            continue
        around = [rate for rate in (*rates[index - 1 : index], *rates[index + 1 : index + 2]) if rate]
        rate = rates[index]
        normalized = rate / float(np.mean(around)) if around and rate is not None else None
        span = (window.begun_s, window.ended_s)
        beside = _unit_rate(window, without([span], halts))
        alone = _unit_rate(window, intersection([span], halts))
        reference = beside / alone if alone else None
        found.append(Stressed(window.kind, window.level, normalized, beside, reference))
    return tuple(found)


def _rate(edges: Sequence[Column], span: Span) -> float | None:
    """Return steps per second in ``span``; None if the job trained in less than half of it."""
    steps = seconds = 0.0
    for one in edges:
        if one.size > 1:
            begin, end = np.clip(span, one[0], one[-1])
            steps, seconds = steps + progress(one, [(begin, end)]), seconds + float(end - begin)
    return steps / seconds if seconds > (span[1] - span[0]) / 2 else None


def _unit_rate(window: Window, spans: Sequence[Span]) -> float:
    edges = np.array([window.begun_s, *window.ends_s], dtype=np.float64)
    seconds = total_s(spans)
    return progress(edges, spans) / seconds if seconds else 0.0


class Curve(msgspec.Struct, frozen=True):
    """The slow-down of a job by each level of one kind of load, and of that load by the job.

    Attributes
    ----------
    levels
        Intensities of the load.
    normalized, interval
        Throughput of the job under each, by that without it, with its interval.
    reference
        Throughput of the load at full intensity beside the job, by that with the job halted.
    pressure
        The intensity that slows the reference down as much; 0 to 1.
    """

    job: str
    kind: str
    levels: tuple[float, ...]
    normalized: tuple[float, ...]
    interval: tuple[tuple[float, float] | None, ...]
    reference: float
    pressure: float


#: By (kind, level): the values of all rounds.
_Values = dict[tuple[str, float], list[float]]


def curves(
    names: Sequence[str],
    kinds: Sequence[str],
    jobs: Mapping[int, Sequence[Stressed]],
    references: Sequence[Stressed],
) -> dict[tuple[int, str], Curve]:
    """Return the measured curves by job and kind.

    Parameters
    ----------
    jobs
        What was measured beside each job, of all rounds.
    references
        The same beside the reference loads.
    """
    beside = _by_load(references)
    found = {}
    for job, values in jobs.items():
        slowed = _by_load(values)
        for kind in kinds:
            loads = [(kind, level) for level in LEVELS]
            known = [one.reference for one in values if one.kind == kind and one.reference is not None]
            if not known or not all(load in slowed and load in beside for load in loads):
                continue
            points = [estimate(Samples(slowed[load])) for load in loads]
            found[job, kind] = _curve(names[job], kind, points, float(np.mean(known)), beside)
    return found


def _curve(name: str, kind: str, points: Sequence[Estimate], reference: float, beside: _Values) -> Curve:
    return Curve(
        job=name,
        kind=kind,
        levels=LEVELS,
        normalized=tuple(point.mean for point in points),
        interval=tuple(point.interval for point in points),
        reference=reference,
        pressure=_pressure(reference, [float(np.mean(beside[kind, level])) for level in LEVELS]),
    )


def _pressure(reference: float, slowed: Sequence[float]) -> float:
    """Return the least intensity at which the reference keeps this part of its speed, interpolated."""
    levels, kept = _falling(slowed)
    falling, first = np.unique(-kept, return_index=True)
    return float(np.interp(-reference, falling, levels[first]))


def throughput(curve: Curve, level: float) -> float:
    """Return the throughput that ``curve`` gives for a load of ``level``, interpolated."""
    return float(np.interp(level, *_falling(curve.normalized)))


def _falling(values: Sequence[float]) -> tuple[Column, Column]:
    """Return intensities from 0 on and ``values`` there, as a curve that starts at 1 and never rises.

    Rises due to noise are levelled out by least squares.
    """
    weights = [_SURE, *(1.0 for _ in values)]
    kept = scipy.optimize.isotonic_regression([1.0, *values], weights=weights, increasing=False).x
    return np.array([0.0, *LEVELS]), np.asarray(kept, dtype=np.float64)


def _by_load(values: Iterable[Stressed]) -> _Values:
    found: _Values = {}
    for one in values:
        if one.normalized is not None:
            found.setdefault((one.kind, one.level), []).append(one.normalized)
    return found
