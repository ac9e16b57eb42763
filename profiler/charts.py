"""Charts as inline SVG: lines over time or over a logarithmic axis, and Gantt charts.

A plot has no width of its own. Places across it are percentages, and its letters keep their size, so that it
reads the same in a narrow window and in a wide one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from .axes import CHARACTER_PX, SHARES, Axis, Column
from .html import COLOURS, colour_key

#: Room above a plot, below it for the axis, and on its right for half of the last label, in pixels.
TOP, BOTTOM, RIGHT = 8, 40, 16
#: Hues the golden angle apart, so that neighbouring numbers look different.
JOB_COLOURS = tuple(f"hsl({index * 137.5 % 360:.0f} 45% 55%)" for index in range(24))
#: Units across the drawing of lines, which is stretched to the plot's width.
_ACROSS = 1000
#: A line of two pixels at the plot's edge is drawn whole.
_EDGE = 3
_LONGEST_NAME = 18


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: ``x`` and ``y`` of shape (points,), in the units of the axes.

    Without a ``colour`` its colour and dashes follow its place among the lines.
    """

    name: str
    x: Column
    y: Column
    colour: str = ""
    dashed: bool = False

    def look(self, index: int) -> tuple[str, str]:
        """Return the colour and the dash pattern of the line with this index; no pattern is a whole line."""
        if self.colour:
            return self.colour, "5 3" if self.dashed else ""
        turn = index // len(COLOURS)
        return COLOURS[index % len(COLOURS)], f"{4 * turn} 3" if turn else ""


def figure(title: str, drawn: str, *, left: float, height: float, kind: str = "", note: str = "") -> str:
    """Return a plot under its title, with ``left`` pixels for the labels on its left."""
    style = f"margin-left:{left:g}px;width:calc(100% - {left + RIGHT:g}px)"
    label = f'role="img" aria-label="{escape(title)}"'
    under = f'<p class="faint">{escape(note)}</p>' if note else ""
    named = f' class="{kind}"' if kind else ""
    return (
        f"<figure{named}><h3>{escape(title)}</h3>"
        f'<svg class="plot" {label} height="{height:g}" style="{style}">{drawn}</svg>{under}</figure>'
    )


def line_chart(
    title: str,
    across: Axis,
    lines: Sequence[Line],
    *,
    up: Axis = SHARES,
    dots: bool = False,
    height: float = 240,
    note: str = "",
) -> str:
    """Return a chart of lines, between 0 and 100 % unless ``up`` is another axis.

    ``data-of`` follows the order of ``lines``. With ``dots`` the points are not connected.
    """
    tall = height - TOP - BOTTOM
    heading = f"{title}, {up.title}" if up.title else title
    drawn = plot(across, lines, up=up, dots=dots, tall=tall)
    return figure(heading, drawn, left=label_width(up.marks.values()), height=height, note=note)


def label_width(labels: Iterable[str]) -> float:
    """Return the room that labels on the left of a plot need, in pixels."""
    return max(map(len, labels), default=0) * CHARACTER_PX + 8


def plot(across: Axis, lines: Sequence[Line], *, up: Axis, tall: float, dots: bool = False) -> str:
    """Return the content of a plot of lines: grid, labels and axis around ``tall`` pixels for the lines."""
    parts = []
    for level, place in zip(up.marks.values(), up.place(np.array([*up.marks], dtype=float)), strict=True):
        y = TOP + tall * (1 - place)
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="-6" y="{y + 4:.1f}" text-anchor="end">{escape(level)}</text>')
    box = f'y="{TOP - _EDGE}" width="100%" height="{tall + 2 * _EDGE:g}"'
    view = f'viewBox="0 {-_EDGE} {_ACROSS} {tall + 2 * _EDGE:g}" preserveAspectRatio="none"'
    draw = _dots if dots else _polyline
    drawn = "".join(
        draw(index, line, across.place(line.x) * _ACROSS, tall * (1 - up.place(line.y)))
        for index, line in enumerate(lines)
    )
    return "".join([*parts, *axis_marks(across, TOP + tall), f"<svg {box} {view}>{drawn}</svg>"])


def _polyline(index: int, line: Line, across: Column, down: Column) -> str:
    colour, dashes = line.look(index)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
    pattern = f' stroke-dasharray="{dashes}"' if dashes else ""
    look = f'stroke="{colour}"{pattern} vector-effect="non-scaling-stroke"'
    title = f"<title>{escape(line.name)}</title>"
    return f'<polyline class="line" data-of="{index}" {look} points="{points}">{title}</polyline>'


def _dots(index: int, line: Line, across: Column, down: Column) -> str:
    path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in zip(across, down, strict=True))
    look = f'stroke="{line.look(index)[0]}" stroke-width="4" stroke-linecap="round"'
    title = f"<title>{escape(line.name)}</title>"
    return f'<path data-of="{index}" {look} vector-effect="non-scaling-stroke" d="{path}">{title}</path>'


def axis_marks(axis: Axis, y: float) -> list[str]:
    """Return the marks and the title of a horizontal axis at height ``y``."""
    parts = []
    places = axis.place(np.array([*axis.marks], dtype=float)) * 100
    for place, text in zip(places, axis.marks.values(), strict=True):
        x = f"{place:.3f}%"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{y:g}" y2="{y + 5:g}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{y + 18:g}" text-anchor="middle">{escape(text)}</text>')
    title = escape(axis.title)
    parts.append(f'<text class="tick" x="50%" y="{y + 34:g}" text-anchor="middle">{title}</text>')
    return parts


def line_swatch(line: Line, index: int) -> str:
    """Return a piece of a line, for a key."""
    colour, dashes = line.look(index)
    pattern = f' stroke-dasharray="{dashes}"' if dashes else ""
    drawn = f'<path d="M0 7h22" stroke="{colour}" stroke-width="3"{pattern}/>'
    return f'<svg class="sample" viewBox="0 0 22 14" aria-hidden="true">{drawn}</svg>'


def line_key(lines: Sequence[Line]) -> str:
    """Return the key of a chart of lines."""
    return colour_key((line_swatch(line, index), line.name) for index, line in enumerate(lines))


def cumulative(
    name: str, values: Column, points: int = 200, *, colour: str = "", dashed: bool = False
) -> Line:
    """Return the cumulative share of ``values`` as a line of ``points`` points. NaN is left out."""
    values = np.sort(values[~np.isnan(values)])
    share = np.linspace(0.0, 1.0, points)
    x = np.quantile(values, share, method="inverted_cdf") if values.size else np.empty(0)
    return Line(name, x, share[: x.size], colour, dashed)


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
    labels: Mapping[int, str],
    *,
    note: str = "",
) -> str:
    """Return the picture of a grid of `holders`: rows downwards, time to the right, one colour per holder.

    ``labels`` are written beside rows, by the row's number; long ones are cut.
    """
    rows, columns = grid.shape
    row_height = max(3, min(16, 360 // rows))
    tall = rows * row_height
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
    back = f'<rect class="row" x="0" y="{TOP}" width="100%" height="{tall}"/>'
    view = f'viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" stroke-width="0.9"'
    drawn = f'<svg y="{TOP}" width="100%" height="{tall}" {view}>{body}</svg>'
    short = {
        row: text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…"
        for row, text in labels.items()
    }
    beside = "".join(
        f'<text class="tick" x="-6" y="{TOP + (row + 0.5) * row_height + 4:g}" text-anchor="end">'
        f"{escape(text)}<title>{escape(labels[row])}</title></text>"
        for row, text in short.items()
    )
    marks = "".join(axis_marks(axis, TOP + tall))
    left, height = label_width(short.values()), TOP + tall + BOTTOM
    return figure(title, f"{back}{drawn}{marks}{beside}", left=left, height=height, kind="gantt", note=note)
