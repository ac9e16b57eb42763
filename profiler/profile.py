"""The profile of a job: made by `gpuslice profile` from a recording, as JSON and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from .axes import Axis, common_unit, number_axis, number_text, short_time
from .charts import Line, cumulative, line_chart
from .html import COLOURS, Table, colour_key, document, render_table, swatch
from .memory import MemoryUse
from .recorder import Recording
from .sampler import DeviceUse
from .skew import Skew
from .steps import Kind, StepSeconds, StepTimes, analyse, classify

_MIB = 1 << 20
_PER_CENT = 100


class Profile(StepTimes, frozen=True, kw_only=True):
    """The profile of one rank: its step times and more; docs/json.md has types and units."""

    rank: int
    memory: MemoryUse | None
    skew: Skew | None
    devices: tuple[DeviceUse, ...]


def make_profile(recording: Recording, devices: Sequence[DeviceUse] = ()) -> Profile:
    """Return the profile of a rank's recording, and of the devices meanwhile."""
    times = analyse(recording)
    fields = {name: getattr(times, name) for name in times.__struct_fields__}
    rank, memory, skew = recording.rank, recording.memory, recording.skew
    return Profile(rank=rank, memory=memory, skew=skew, devices=tuple(devices), **fields)


def summary(profile: Profile) -> list[tuple[str, str]]:
    """Return the profile as text: names and values."""
    rows = [("steps", f"{profile.steps} ({profile.warmup_steps} of warm-up left out)")]
    seconds = profile.step_seconds
    if seconds is not None:
        rows += [
            ("step time", f"{short_time(seconds.median)} (median; {_interval(seconds)})"),
            ("p10, p90", f"{short_time(seconds.p10)}, {short_time(seconds.p90)}"),
            ("jitter", f"{seconds.jitter * _PER_CENT:.1f} %"),
        ]
    if profile.data_share is not None:
        rows.append(("waiting for data", f"{profile.data_share * _PER_CENT:.1f} % of the steps"))
    rows.append(("cores kept busy", f"{profile.cpu_cores:.2f}"))
    rows += [
        (name.replace("_", " "), f"{phase.count}x, {short_time(phase.seconds)} together")
        for name, phase in profile.phases.items()
        if phase.count
    ]
    rows += [
        (
            "change",
            f"at step {one.step}: {short_time(one.before_seconds)} to {short_time(one.after_seconds)}",
        )
        for one in profile.changes
    ]
    if profile.memory is not None:
        rows += [
            (f"memory, {name.removesuffix('_bytes')}", "not told" if value is None else _size(value))
            for name, value in msgspec.structs.asdict(profile.memory).items()
        ]
    if profile.skew is not None:
        rows.append(("tensor skew", verdict(profile.skew)))
    rows += [(one.device, _use(one)) for one in profile.devices]
    return [*rows, ("overhead", f"{profile.overhead * _PER_CENT:.3f} % of the time")]


def verdict(skew: Skew) -> str:
    """Return the skew and its consequence as text."""
    where = "consolidate" if skew.consolidate else "may be spread"
    return f"{skew.skew:.3f} (threshold {skew.threshold:g}): {where}"


def page(name: str, profile: Profile, recording: Recording) -> str:
    """Return the profile as one HTML file that needs no network."""
    kinds = classify(recording)
    intervals_s = np.array(recording.interval_s)
    steps_s = intervals_s[kinds == Kind.STEP]
    lead = [
        f"Profile of {name}: rank {profile.rank}, {len(intervals_s)} intervals between boundaries, "
        f"clock: {profile.clock}."
    ]
    unit, size_s = common_unit(steps_s if steps_s.size else intervals_s)
    charts = []
    if steps_s.size:
        top_s = _top(intervals_s, steps_s)
        pair = _over_time(intervals_s, kinds, top_s, (unit, size_s)) + _distribution(
            steps_s, top_s, (unit, size_s)
        )
        charts = [f'<div class="pair">{pair}</div>']
    table = Table("Figures", ("figure", "value"), summary(profile))
    others = [
        (str(index), _words(kinds[index]), number_text(intervals_s[index] / size_s))
        for index in np.flatnonzero((kinds != Kind.STEP) & (kinds != Kind.WARMUP))
    ]
    header = ("interval", "kind", f"time, {unit}")
    more = [Table("Intervals that were no steps", header, others)] if others else []
    return document(headline(name, profile), lead, [*charts, *map(render_table, (table, *more))])


def headline(name: str, profile: Profile) -> str:
    """Return how long a step takes and how much of it waits for data, in one sentence.

    If the step time changed for good, one number does not describe it: the sentence then says so.
    """
    if profile.step_seconds is None:
        return f"{name} made too few steps for a profile"
    times = len(profile.changes)
    changed = f", but changed {'once' if times == 1 else f'{times} times'}" if times else ""
    step = f"A step of {name} takes {short_time(profile.step_seconds.median)}{changed}"
    if profile.data_share is None:
        return step
    return f"{step}; {profile.data_share * _PER_CENT:.1f} % of it waits for data"


def _top(intervals_s: Any, steps_s: Any) -> float:
    """Return where the axes of both charts end. A few far longer intervals lie beyond."""
    longest_s, usual_s = float(intervals_s.max()), float(np.quantile(steps_s, 0.99))
    return max(1.1 * longest_s if longest_s <= 3 * usual_s else 1.5 * usual_s, 1e-9)


def _over_time(intervals_s: Any, kinds: Any, top_s: float, unit: tuple[str, float]) -> str:
    """Return a chart of each interval."""
    beyond = int((intervals_s > top_s).sum())
    are = "is one that takes" if beyond == 1 else f"are {beyond} that take"
    note = f"At the upper edge {are} longer than the axis." if beyond else ""
    ordered = sorted(Kind, key=lambda kind: kind != Kind.STEP)
    lines = []
    for colour, kind in zip(COLOURS, ordered, strict=False):
        at = np.flatnonzero(kinds == kind)
        if at.size:
            lines.append(
                Line(
                    _words(kind),
                    at.astype(np.float64),
                    np.minimum(intervals_s[at], top_s).astype(np.float64),
                    colour,
                )
            )
    across, up = _number_axis("interval", len(intervals_s)), number_axis(unit[0], top_s, size=unit[1])
    chart = line_chart("Time of each interval", across, lines, up=up, dots=True, note=note)
    return f"<div>{chart}{colour_key((swatch(line.colour), line.name) for line in lines)}</div>"


def _distribution(steps_s: Any, top_s: float, unit: tuple[str, float]) -> str:
    beyond = int((steps_s > top_s).sum())
    note = f"{beyond} of {len(steps_s)} steps take longer than the axis." if beyond else ""
    axis = number_axis(f"step time, {unit[0]}", top_s, size=unit[1])
    return line_chart("Share of steps that take at most", axis, [cumulative("steps", steps_s)], note=note)


def _number_axis(title: str, count: int) -> Axis:
    """Return an axis of whole numbers below ``count``, with room for the first and the last dot."""
    axis = number_axis(title, max(count, 1) - 0.5, -0.5)
    marks = {at: text for at, text in axis.marks.items() if at == int(at)}
    return Axis(title, axis.low, axis.high, marks)


def _words(kind: Kind) -> str:
    return kind.value.replace("_", " ")


def _interval(seconds: StepSeconds) -> str:
    if seconds.interval is None:
        return "too few independent steps for an interval"
    low, high = map(short_time, seconds.interval)
    return f"{seconds.confidence * _PER_CENT:g} %: {low} to {high}"


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:.1f} MiB"


def _use(use: DeviceUse) -> str:
    parts = [] if use.utilization is None else [f"{use.utilization:.0f} % used"]
    parts += [] if use.memory_used is None else [f"{use.memory_used:.0f} MiB at most"]
    parts += [] if use.power_draw is None else [f"{use.power_draw:.0f} W"]
    return ", ".join(parts) or "not told"
