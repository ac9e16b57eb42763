"""What loads of one kind do to a job, and what a job does to a load: sensitivity curves and pressures.

A job's pressure of a kind is the intensity of our own load that slows a reference load down as much as the
job does (Bubble-Up, MICRO 2011). The reference is the load at full intensity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuslice.profiler.recorder import Recording

from .statistics import Estimate, estimate

#: Of a load: the share of the time in which it works.
LEVELS = (0.25, 0.5, 1.0)


class Phase(msgspec.Struct, frozen=True):
    """A part of a stressor's schedule; without a kind it does nothing."""

    kind: str
    level: float
    seconds: float


class Window(msgspec.Struct, frozen=True):
    """A phase as it was: from ``begun_s`` to ``ended_s`` on the host's clock; when each unit ended."""

    kind: str
    level: float
    begun_s: float
    ended_s: float
    ends_s: list[float]


class StressLog(msgspec.Struct, frozen=True):
    """What a stressor did."""

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
        Throughput of the load.
    """

    kind: str
    level: float
    normalized: float | None
    units_per_second: float


def schedule(kinds: Sequence[str], seconds: float, seed: int) -> list[Phase]:
    """All levels of all ``kinds`` in an order given by ``seed``; a pause of the same length around each."""
    loads = [Phase(kind, level, seconds) for kind in kinds for level in LEVELS]
    Random(seed).shuffle(loads)
    pause = Phase("", 0.0, seconds)
    return [pause, *(phase for load in loads for phase in (load, pause))]


def recorded_edges(recordings: Iterable[Recording]) -> list[NDArray[np.float64]]:
    """When the steps of each start ended, and when its first began."""
    return [one.begun_s + np.concatenate([[0.0], np.cumsum(one.interval_s)]) for one in recordings]


def unit_edges(log: StressLog) -> list[NDArray[np.float64]]:
    """The same of a stressor in place of a job."""
    return [np.array(window.ends_s, dtype=np.float64) for window in log.windows if window.kind]


def stressed(edges: Sequence[NDArray[np.float64]], log: StressLog) -> tuple[Stressed, ...]:
    """What each load of ``log`` did to the job whose steps ended at ``edges``."""
    found = []
    rates = [_rate(edges, window) for window in log.windows]
    for index, window in enumerate(log.windows):
        if not window.kind:
            continue
        around = [rate for rate in (*rates[index - 1 : index], *rates[index + 1 : index + 2]) if rate]
        rate = rates[index]
        normalized = rate / float(np.mean(around)) if around and rate is not None else None
        seconds = window.ended_s - window.begun_s
        found.append(Stressed(window.kind, window.level, normalized, len(window.ends_s) / seconds))
    return tuple(found)


def _rate(edges: Sequence[NDArray[np.float64]], window: Window) -> float | None:
    """Steps per second in ``window``; ``None`` if the job trained in less than half of it."""
    steps = seconds = 0.0
    for one in edges:
        if one.size > 1:
            begin, end = np.clip([window.begun_s, window.ended_s], one[0], one[-1])
            numbers = np.interp([begin, end], one, np.arange(one.size))
            steps, seconds = steps + float(numbers[1] - numbers[0]), seconds + float(end - begin)
    return steps / seconds if seconds > (window.ended_s - window.begun_s) / 2 else None


class Curve(msgspec.Struct, frozen=True):
    """How one kind of load slows a job down, and how the job slows down that load.

    Attributes
    ----------
    levels
        Intensities of the load.
    normalized, interval
        Throughput of the job under each, by that without it, with its interval.
    reference
        Throughput of the load at full intensity beside the job, by that alone.
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
    """The curves by job and kind, as far as they were measured.

    Parameters
    ----------
    jobs
        What was measured beside each job, of all rounds.
    references
        The same beside the reference loads.
    """
    beside, together = _by_load(references, rates=False), _by_load(references, rates=True)
    found = {}
    for job, values in jobs.items():
        slowed, rates = _by_load(values, rates=False), _by_load(values, rates=True)
        for kind in kinds:
            loads = [(kind, level) for level in LEVELS]
            if not all(load in slowed and load in beside for load in loads):
                continue
            points = [estimate(slowed[load]) for load in loads]
            # Two full loads beside each other are alike: the share that one keeps is that of the other.
            full = float(np.mean(together[kind, 1.0])) / float(np.mean(beside[kind, 1.0]))
            reference = float(np.mean(rates[kind, 1.0])) / full
            found[job, kind] = _curve(names[job], kind, points, reference, beside)
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
    """The least intensity at which the reference keeps ``reference`` of its speed, between those measured."""
    # A curve that falls: what one more noisy point says otherwise is levelled out.
    falling, first = np.unique(-np.minimum.accumulate([1.0, *slowed]), return_index=True)
    return float(np.interp(-reference, falling, np.array([0.0, *LEVELS])[first]))


def throughput(curve: Curve, level: float) -> float:
    """What ``curve`` says for a load of ``level``, between the measured points."""
    return float(np.interp(level, [0.0, *curve.levels], [1.0, *curve.normalized]))


def _by_load(values: Iterable[Stressed], *, rates: bool) -> _Values:
    found: _Values = {}
    for one in values:
        value = one.units_per_second if rates else one.normalized
        if value is not None:
            found.setdefault((one.kind, one.level), []).append(value)
    return found
