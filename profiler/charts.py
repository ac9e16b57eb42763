"""Charts as inline SVG: lines over time or over a logarithmic axis, and Gantt charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

import numpy as np
from numpy.typing import NDArray

from .html import COLOURS, round_step

Column = NDArray[np.float64]

_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 8, 40
_UNITS_S = {"d": 86_400.0, "h": 3600.0, "min": 60.0, "s": 1.0}
#: Marks of a logarithmic time axis, in seconds.
_TIME_MARKS_S = (0.01, 0.1, 1, 10, 60, 600, 3600, 21_600, 86_400, 864_000, 8_640_000)
#: Hues the golden angle apart, so that neighbouring numbers look different.
JOB_COLOURS = tuple(f"hsl({index * 137.5 % 360:.0f} 45% 55%)" for index in range(24))


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: ``x`` and ``y`` of shape (points,), ``y`` between 0 and 1."""

    name: str
    x: Column
    y: Column


@dataclass(frozen=True, slots=True)
class Axis:
    """A horizontal axis from ``low`` to ``high`` with labelled ``marks``."""

    title: str
    low: float
    high: float
    marks: Mapping[float, str]
    logarithmic: bool = False

    def place(self, values: Column, width: float) -> Column:
        """Return the horizontal positions of ``values`` on ``width`` pixels."""
        if self.logarithmic:
            share = np.log(values / self.low) / np.log(self.high / self.low)
        else:
            share = (values - self.low) / (self.high - self.low)
        placed: Column = np.clip(share, 0.0, 1.0) * width
        return placed


def duration(seconds: float) -> str:
    """Return a time in the unit that reads best: ``3.4 h``."""
    unit = next((name for name, size_s in _UNITS_S.items() if abs(seconds) >= size_s), "s")
    return f"{seconds / _UNITS_S[unit]:.3g} {unit}"


def short_time(seconds: float) -> str:
    """Return a time like `duration`, below a second in milliseconds."""
    return f"{seconds * 1e3:.3g} ms" if 0 < seconds < 1 else duration(seconds)


def time_axis(title: str, end_s: float) -> Axis:
    """Return an axis from 0 to ``end_s``, marked in days, hours, minutes or seconds."""
    end_s = end_s or 1.0
    unit = next((name for name, size_s in _UNITS_S.items() if end_s >= 3 * size_s), "s")
    step_s = round_step(end_s / _UNITS_S[unit] / 10) * _UNITS_S[unit]
    marks = {i * step_s: f"{i * step_s / _UNITS_S[unit]:g} {unit}" for i in range(floor(end_s / step_s) + 1)}
    return Axis(title, 0.0, end_s, marks)


def log_axis(title: str, values: Column, *, times: bool) -> Axis:
    """Return a logarithmic axis that contains the positive numbers among ``values``."""
    known = values[np.isfinite(values) & (values > 0)]
    low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 10.0)
    low, high = low / 1.05, high * 1.05
    if times:
        marks = {second: duration(second) for second in _TIME_MARKS_S}
    else:
        powers = range(floor(log10(low)), ceil(log10(high)) + 1)
        marks = {10.0**power: f"{10.0**power:g}" for power in powers}
        if len(powers) < 5:
            marks |= {f * 10.0**power: f"{f * 10.0**power:g}" for power in powers for f in (2, 5)}
    return Axis(title, low, high, {at: text for at, text in marks.items() if low <= at <= high}, True)


#: Marks of a vertical axis by height.
PERCENT = {share / 100: f"{share} %" for share in (0, 25, 50, 75, 100)}


def line_chart(
    title: str,
    axis: Axis,
    lines: Sequence[Line],
    *,
    levels: Mapping[float, str] = PERCENT,
    dots: bool = False,
    width: int = 540,
    height: int = 280,
) -> str:
    """Return a chart of lines between 0 and 100 %. Colours and ``data-of`` follow the order of ``lines``.

    ``levels`` are the marks of the vertical axis, if it does not show shares. With ``dots`` the points are
    not connected.
    """
    inner, tall = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM
    parts = []
    for level, text in levels.items():
        y = _TOP + tall * (1 - level)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:g}" y2="{y:g}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:g}" text-anchor="end">{text}</text>')
    parts += _ticks(axis, _LEFT, inner, height - _BOTTOM)
    for index, line in enumerate(lines):
        across, down = _LEFT + axis.place(line.x, inner), _TOP + tall * (1 - np.clip(line.y, 0, 1))
        if dots:
            path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in zip(across, down, strict=True))
            parts.append(
                f'<path data-of="{index}" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="4" '
                f'stroke-linecap="round" d="{path}"><title>{escape(line.name)}</title></path>'
            )
            continue
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
        look = f'stroke="{COLOURS[index % len(COLOURS)]}"{_dashes(index)}'
        parts.append(
            f'<polyline class="line" data-of="{index}" {look} points="{points}">'
            f"<title>{escape(line.name)}</title></polyline>"
        )
    label = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"'
    return f"<figure><h3>{escape(title)}</h3><svg {label}>{''.join(parts)}</svg></figure>"


def _dashes(index: int) -> str:
    """Return the dash pattern of a line: lines beyond the number of colours are dashed."""
    return "" if index < len(COLOURS) else f' stroke-dasharray="{4 * (index // len(COLOURS))} 3"'


def _ticks(axis: Axis, left: float, width: float, y: float) -> list[str]:
    parts = []
    for at, text in axis.marks.items():
        x = left + float(axis.place(np.array([at]), width)[0])
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 5}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{y + 18}" text-anchor="middle">{escape(text)}</text>'
        )
    middle = left + width / 2
    parts.append(f'<text class="tick" x="{middle:g}" y="{y + 34}" text-anchor="middle">{axis.title}</text>')
    return parts


def cumulative(name: str, values: Column, points: int = 200) -> Line:
    """Return the cumulative share of ``values`` as a line of ``points`` points. NaN is left out."""
    values = np.sort(values[~np.isnan(values)])
    share = np.linspace(0.0, 1.0, points)
    x = np.quantile(values, share, method="inverted_cdf") if values.size else np.empty(0)
    return Line(name, x, share[: x.size])


def holders(
    spans: Sequence[tuple[int, float, float, Sequence[int]]], rows: int, columns: int, end_s: float
) -> NDArray[np.int64]:
    """Return who held each row in the middle of each of ``columns`` equal stretches of time.

    Parameters
    ----------
    spans
        ``(holder, start_s, end_s, rows)``.

    Returns
    -------
    numpy.ndarray
        Shape (rows, columns): the holder, -1 for none; of several at once the last in ``spans``.
    """
    grid = np.full((rows, columns), -1, dtype=np.int64)
    if not spans:
        return grid
    times = np.array([(start_s, end_s) for _, start_s, end_s, _ in spans])
    bounds = np.ceil(times / (end_s or 1.0) * columns - 0.5).astype(np.int64)
    for index in np.flatnonzero(bounds[:, 1] > bounds[:, 0]):
        holder, _, _, held = spans[int(index)]
        first, last = bounds[index]
        grid[list(held), first:last] = holder
    return grid


def gantt(
    title: str,
    axis: Axis,
    grid: NDArray[np.int64],
    names: Sequence[str],
    ends: tuple[str, str],
    *,
    width: int = 1100,
) -> str:
    """Return the picture of a grid of `holders`: rows downwards, time to the right, one colour per holder.

    ``ends`` labels the first and the last row.
    """
    rows, columns = grid.shape
    row_height = max(3, min(14, 360 // rows))
    inner, tall = width - _LEFT - _RIGHT, rows * row_height
    paths: dict[int, list[str]] = {}
    for row in range(rows):
        changes = np.flatnonzero(np.diff(grid[row], prepend=-2))
        for first, last in zip(changes, [*changes[1:], columns], strict=True):
            if grid[row, first] >= 0:
                piece = f"M{first} {row + 0.5}h{last - first}"
                paths.setdefault(int(grid[row, first]), []).append(piece)
    body = "".join(
        f'<path class="job" stroke="{JOB_COLOURS[holder % len(JOB_COLOURS)]}" d="{"".join(pieces)}">'
        f"<title>{escape(names[holder])}</title></path>"
        for holder, pieces in paths.items()
    )
    scale = f'transform="translate({_LEFT} {_TOP}) scale({inner / columns:.5f} {row_height})"'
    back = f'<rect class="row" x="{_LEFT}" y="{_TOP}" width="{inner}" height="{tall}"/>'
    ticks = "".join(_ticks(axis, _LEFT, inner, _TOP + tall))
    ticks += f'<text class="tick" x="{_LEFT - 6}" y="{_TOP + 10}" text-anchor="end">{escape(ends[0])}</text>'
    ticks += (
        f'<text class="tick" x="{_LEFT - 6}" y="{_TOP + tall}" text-anchor="end">{escape(ends[1])}</text>'
    )
    label = f'viewBox="0 0 {width} {_TOP + tall + _BOTTOM}" role="img" aria-label="{escape(title)}"'
    picture = f'{back}<g stroke-width="0.9" {scale}>{body}</g>{ticks}'
    return f'<figure class="gantt"><h3>{escape(title)}</h3><svg {label}>{picture}</svg></figure>'
