"""A timeline as one HTML file: inline SVG with titles to hover over, no script, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from .axes import CHARACTER_PX, Axis, number_axis, time_axis
from .charts import BOTTOM, RIGHT, axis_marks
from .html import COLOURS, Table, colour_key, document, render_table, swatch
from .timeline import Holding, Span, Timeline, Track

_LABEL_WIDTH = 104
_ROW_HEIGHT = 30
_GROUP_HEIGHT = 26
_STRIP_HEIGHT = 48
#: A bar narrower than this, in per cent of the width, could not be seen.
_MIN_BAR = 0.1
#: A level of memory lower than this, in pixels, could not be seen.
_MIN_LEVEL = 1.5
#: Width of a picture outside of a page: what a README shows at its full size.
_PICTURE_WIDTH = 880
#: Letters of a track's name that fit beside its row.
_LONGEST_NAME = 13
#: Style of a picture outside of a page.
_STYLE = (
    "text { fill: #1d2129; font: 12px system-ui, sans-serif; }",
    ".group { fill: #6b7280; font-weight: 600; } .tick { fill: #6b7280; }",
    ".row { fill: #f3f5f8; } .grid { stroke: #d8dce3; stroke-width: 1; }",
)


@dataclass(frozen=True, slots=True)
class Paint:
    """The look of one kind of bars. Bars without a colour of their own take that of their subject."""

    colour: str = ""
    opacity: float = 1.0


def page(
    title: str, lead: Sequence[str], timeline: Timeline, kinds: dict[str, Paint], tables: Iterable[Table]
) -> str:
    """Return the whole page of a timeline as HTML.

    Parameters
    ----------
    title, lead
        Headline and the paragraphs under it.
    timeline
        What to draw.
    kinds
        The kinds of spans, in the order of the key.
    tables
        What else to tell.
    """
    subjects = _subjects(timeline)
    parts = [
        _key(subjects, kinds),
        _in_page(timeline, subjects, kinds),
        '<p class="faint">Hover over a bar for its numbers.</p>',
        *(render_table(table) for table in tables),
    ]
    return document(title, lead, parts)


def picture(timeline: Timeline, kinds: dict[str, Paint]) -> str:
    """Return the page's picture as an SVG file of its own, on white, with a key of the kinds below it."""
    drawn, height = _picture(timeline, _subjects(timeline), kinds)
    style = "".join(f"{rule}\n" for rule in _STYLE)
    whole = height + _ROW_HEIGHT
    size = f'viewBox="-8 0 {_PICTURE_WIDTH + 8} {whole}" width="{_PICTURE_WIDTH + 8}" height="{whole}"'
    place = f'x="{_LABEL_WIDTH}" width="{_PICTURE_WIDTH - _LABEL_WIDTH - RIGHT}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="timeline">'
        f"<style>\n{style}</style>"
        f'<rect x="-8" width="100%" height="100%" fill="#ffffff"/>'
        f'<svg {place} overflow="visible">{drawn}</svg>{_drawn_key(kinds, height)}</svg>\n'
    )


def _drawn_key(kinds: dict[str, Paint], y: float) -> str:
    """Return the key of the kinds as a line of the picture; rows say which colour is whose."""
    x, parts = float(_LABEL_WIDTH), []
    for kind, paint in kinds.items():
        if paint == Paint():
            continue
        look = f'fill="{paint.colour or "#1d2129"}" fill-opacity="{paint.opacity}"'
        parts.append(f'<rect x="{x:g}" y="{y + 4:g}" width="14" height="14" rx="2" {look}/>')
        parts.append(f'<text x="{x + 20:g}" y="{y + 15:g}">{escape(kind)}</text>')
        x += 20 + len(kind) * CHARACTER_PX + 20
    return "".join(parts)


def _in_page(timeline: Timeline, subjects: dict[str, str], kinds: dict[str, Paint]) -> str:
    drawn, height = _picture(timeline, subjects, kinds)
    style = f"margin-left:{_LABEL_WIDTH}px;width:calc(100% - {_LABEL_WIDTH + RIGHT}px)"
    label = 'role="img" aria-label="timeline"'
    return f'<figure><svg class="plot" {label} height="{height}" style="{style}">{drawn}</svg></figure>'


def _subjects(timeline: Timeline) -> dict[str, str]:
    names = dict.fromkeys(span.subject for track in timeline.tracks for span in track.spans)
    names |= dict.fromkeys(holding.subject for track in timeline.tracks for holding in track.holdings)
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def _key(subjects: dict[str, str], kinds: dict[str, Paint]) -> str:
    """Return the key: whose bars have which colour, and the kinds that look otherwise."""
    entries = [(swatch(colour), name) for name, colour in subjects.items()]
    entries += [
        (swatch(paint.colour or "currentColor", paint.opacity), kind)
        for kind, paint in kinds.items()
        if paint != Paint()
    ]
    return colour_key(entries)


def _picture(timeline: Timeline, subjects: dict[str, str], kinds: dict[str, Paint]) -> tuple[str, int]:
    """Return what is drawn to the right of the names, with the names on its left, and its height."""
    end_s = timeline.end_s or 1.0
    most_bytes = max((one.nbytes for track in timeline.tracks for one in track.holdings), default=0) or 1
    body: list[str] = []
    y, group = 0, None
    for track in timeline.tracks:
        if track.group != group:
            group = track.group
            body.append(f'<text class="group" x="{-_LABEL_WIDTH}" y="{y + 18}">{escape(group)}</text>')
            y += _GROUP_HEIGHT
        body.append(_row(y, _ROW_HEIGHT - 6))
        body.append(_name(track.name, y + 17))
        body += [_bar(span, y, end_s, subjects[span.subject], kinds[span.kind]) for span in track.spans]
        y += _ROW_HEIGHT
        if track.holdings:
            body += _strip(track, y, end_s, most_bytes, subjects)
            y += _STRIP_HEIGHT
    body += axis_marks(_axis(end_s), y - 2)
    return "".join(body), y - 2 + BOTTOM


def _axis(end_s: float) -> Axis:
    """Return the axis of time. It is in seconds, as in the tables, unless that is far too fine or coarse."""
    return number_axis("time, s", end_s) if 0.1 <= end_s <= 3600 else time_axis("time", end_s)


def _row(y: int, height: int) -> str:
    return f'<rect class="row" x="0" y="{y}" width="100%" height="{height}"/>'


def _name(name: str, y: int) -> str:
    short = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
    whole = "" if short == name else f"<title>{escape(name)}</title>"
    return f'<text x="{8 - _LABEL_WIDTH}" y="{y}">{escape(short)}{whole}</text>'


def _across(start_s: float, duration_s: float, end_s: float) -> str:
    """Return the place and width of what lasts from ``start_s`` on, of ``end_s`` altogether."""
    width = max(100 * duration_s / end_s, _MIN_BAR)
    return f'x="{min(100 * start_s / end_s, 100 - width):.3f}%" width="{width:.3f}%"'


def _bar(span: Span, y: int, end_s: float, colour: str, paint: Paint) -> str:
    when = f"{span.start_s:.3f} s to {span.end_s:.3f} s ({span.duration_s * 1e3:.1f} ms)"
    details = "".join(f"\n{key}: {_value(value)}" for key, value in span.details.items())
    place = f'{_across(span.start_s, span.duration_s, end_s)} y="{y}" height="{_ROW_HEIGHT - 6}"'
    look = f'fill="{paint.colour or colour}" fill-opacity="{paint.opacity}"'
    return f'<rect class="bar" {place} {look}><title>{escape(f"{span.name}: {when}{details}")}</title></rect>'


def _strip(track: Track, y: int, end_s: float, most_bytes: int, subjects: dict[str, str]) -> list[str]:
    """Return the strip of the memory that each subject held over time; ``most_bytes`` is its top."""
    height = _STRIP_HEIGHT - 6
    return [
        _row(y, height),
        f'<text class="tick" x="{8 - _LABEL_WIDTH}" y="{y + 16}">memory,</text>',
        f'<text class="tick" x="{8 - _LABEL_WIDTH}" y="{y + 32}">to {most_bytes / 1e6:,.1f} MB</text>',
        *(
            _level(holding, y, height, end_s, most_bytes, subjects[holding.subject])
            for holding in track.holdings
        ),
    ]


def _level(holding: Holding, y: int, height: int, end_s: float, most_bytes: int, colour: str) -> str:
    tall = max(height * holding.nbytes / most_bytes, _MIN_LEVEL)
    when = f"{holding.start_s:.3f} s to {holding.end_s:.3f} s"
    title = escape(f"{holding.subject}: {holding.nbytes / 1e6:.1f} MB of device memory, {when}")
    across = _across(holding.start_s, holding.end_s - holding.start_s, end_s)
    place = f'{across} y="{y + height - tall:.2f}" height="{tall:.2f}"'
    return f'<rect class="level" {place} fill="{colour}" fill-opacity="0.6"><title>{title}</title></rect>'


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
