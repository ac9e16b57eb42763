"""The profile of a job: made by `gpuslice profile` from a recording, as JSON and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from .charts import Axis, Line, cumulative, duration, line_chart, short_time
from .html import COLOURS, Table, colour_key, document, render_table, round_step, swatch
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
    charts = []
    if steps_s.size:
        charts = [_over_time(intervals_s, kinds), _distribution(steps_s)]
    table = Table("Figures", ("figure", "value"), summary(profile))
    others = [
        (str(index), kinds[index].value, short_time(intervals_s[index]))
        for index in np.flatnonzero((kinds != Kind.STEP) & (kinds != Kind.WARMUP))
    ]
    more = [Table("What was no step", ("interval", "kind", "time"), others)] if others else []
    return document(headline(name, profile), lead, [*charts, *map(render_table, (table, *more))])


def headline(name: str, profile: Profile) -> str:
    """Return how long a step takes and how much of it waits for data, in one sentence."""
    if profile.step_seconds is None:
        return f"{name} made too few steps for a profile"
    step = f"A step of {name} takes {short_time(profile.step_seconds.median)}"
    if profile.data_share is None:
        return step
    return f"{step}; {profile.data_share * _PER_CENT:.1f} % of it waits for data"


def _over_time(intervals_s: Any, kinds: Any) -> str:
    """Return a chart of each interval. The vertical axis ends at twice the longest step."""
    top_s = max(2 * float(intervals_s[kinds == Kind.STEP].max()), 1e-9)
    axis = _number_axis("interval", len(intervals_s))
    lines = []
    for kind in Kind:
        at = np.flatnonzero(kinds == kind).astype(float)
        if at.size:
            name = kind.value.replace("_", " ")
            lines.append(Line(name, at, intervals_s[at.astype(int)] / top_s))
    levels = {share: duration(share * top_s) for share in (0.0, 0.25, 0.5, 0.75, 1.0)}
    chart = line_chart("Time of each interval", axis, lines, levels=levels, dots=True, width=1100)
    names = zip(COLOURS, lines, strict=False)
    return chart + colour_key((swatch(colour), line.name) for colour, line in names)


def _distribution(steps_s: Any) -> str:
    high_s = float(steps_s.max()) * 1.05
    step_s = round_step(high_s / 8)
    marks = {i * step_s: duration(i * step_s) for i in range(int(high_s / step_s) + 1)}
    axis = Axis("step time", 0.0, high_s, marks)
    return line_chart("Share of steps that take at most", axis, [cumulative("steps", steps_s)])


def _number_axis(title: str, count: int) -> Axis:
    step = max(1.0, round_step(count / 10))
    marks = {i * step: f"{i * step:g}" for i in range(int(count / step) + 1)}
    return Axis(title, 0.0, float(max(count, 1)), marks)


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
