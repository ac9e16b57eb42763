"""A timeline as one HTML file: inline SVG with titles to hover over, no script, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from .html import COLOURS, Table, colour_key, document, render_table, round_step, swatch
from .timeline import Holding, Span, Timeline, Track

_WIDTH = 1100
_LABEL_WIDTH = 110
_ROW_HEIGHT = 30
_GROUP_HEIGHT = 26
_AXIS_HEIGHT = 28
_STRIP_HEIGHT = 48
#: A bar narrower than this, in pixels, could not be seen.
_MIN_BAR = 0.75
#: A level of memory lower than this, in pixels, could not be seen.
_MIN_LEVEL = 1.5
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
        f'<div class="scroll">{_picture(timeline, subjects, kinds)}</div>',
        '<p class="faint">Hover over a bar for its numbers.</p>',
        *(render_table(table) for table in tables),
    ]
    return document(title, lead, parts)


def picture(timeline: Timeline, kinds: dict[str, Paint]) -> str:
    """Return the page's picture as an SVG file of its own, on white. The bars' titles serve as its key."""
    drawn = _picture(timeline, _subjects(timeline), kinds)
    tag, rest = drawn.split(">", 1)
    style = "".join(f"{rule}\n" for rule in _STYLE)
    return (
        f'{tag} xmlns="http://www.w3.org/2000/svg"><style>\n{style}</style>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{rest}\n'
    )


def _subjects(timeline: Timeline) -> dict[str, str]:
    names = dict.fromkeys(span.subject for track in timeline.tracks for span in track.spans)
    names |= dict.fromkeys(holding.subject for track in timeline.tracks for holding in track.holdings)
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def _key(subjects: dict[str, str], kinds: dict[str, Paint]) -> str:
    entries = [(swatch(colour), name) for name, colour in subjects.items()]
    entries += [
        (swatch(paint.colour or "currentColor", paint.opacity), kind) for kind, paint in kinds.items()
    ]
    return colour_key(entries)


def _picture(timeline: Timeline, subjects: dict[str, str], kinds: dict[str, Paint]) -> str:
    end_s = timeline.end_s or 1.0
    scale = (_WIDTH - _LABEL_WIDTH - 10) / end_s
    body: list[str] = []
    y, group = 0, None
    for track in timeline.tracks:
        if track.group != group:
            group = track.group
            body.append(f'<text class="group" x="0" y="{y + 18}">{escape(group)}</text>')
            y += _GROUP_HEIGHT
        width = _WIDTH - _LABEL_WIDTH - 10
        body.append(
            f'<rect class="row" x="{_LABEL_WIDTH}" y="{y}" width="{width}" height="{_ROW_HEIGHT - 6}"/>'
        )
        body.append(f'<text x="8" y="{y + 17}">{escape(track.name)}</text>')
        body += [_bar(span, y, scale, subjects[span.subject], kinds[span.kind]) for span in track.spans]
        y += _ROW_HEIGHT
        if track.holdings:
            body += _strip(track, y, scale, subjects)
            y += _STRIP_HEIGHT
    body += _axis(end_s, scale, y)
    size = f'viewBox="0 0 {_WIDTH} {y + _AXIS_HEIGHT}"'
    return f'<svg {size} role="img" aria-label="timeline">{"".join(body)}</svg>'


def _bar(span: Span, y: int, scale: float, colour: str, paint: Paint) -> str:
    x = _LABEL_WIDTH + span.start_s * scale
    width = max(span.duration_s * scale, _MIN_BAR)
    when = f"{span.start_s:.3f} s to {span.end_s:.3f} s ({span.duration_s * 1e3:.1f} ms)"
    details = "".join(f"\n{key}: {_value(value)}" for key, value in span.details.items())
    place = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW_HEIGHT - 6}"'
    look = f'fill="{paint.colour or colour}" fill-opacity="{paint.opacity}"'
    return f'<rect class="bar" {place} {look}><title>{escape(f"{span.name}: {when}{details}")}</title></rect>'


def _strip(track: Track, y: int, scale: float, subjects: dict[str, str]) -> list[str]:
    """Return the strip of the memory that each subject held on a device, over time."""
    most_bytes = max(max(holding.nbytes for holding in track.holdings), 1)
    height = _STRIP_HEIGHT - 6
    width = _WIDTH - _LABEL_WIDTH - 10
    return [
        f'<rect class="row" x="{_LABEL_WIDTH}" y="{y}" width="{width}" height="{height}"/>',
        f'<text class="tick" x="8" y="{y + 12}">memory</text>',
        f'<text class="tick" x="8" y="{y + 28}">to {most_bytes / 1e6:.1f} MB</text>',
        *(
            _level(holding, y, height, scale, most_bytes, subjects[holding.subject])
            for holding in track.holdings
        ),
    ]


def _level(holding: Holding, y: int, height: int, scale: float, most_bytes: int, colour: str) -> str:
    x = _LABEL_WIDTH + holding.start_s * scale
    width = max((holding.end_s - holding.start_s) * scale, _MIN_BAR)
    tall = max(height * holding.nbytes / most_bytes, _MIN_LEVEL)
    when = f"{holding.start_s:.3f} s to {holding.end_s:.3f} s"
    title = escape(f"{holding.subject}: {holding.nbytes / 1e6:.1f} MB of device memory, {when}")
    place = f'x="{x:.2f}" y="{y + height - tall:.2f}" width="{width:.2f}" height="{tall:.2f}"'
    return f'<rect class="level" {place} fill="{colour}" fill-opacity="0.6"><title>{title}</title></rect>'


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _axis(end_s: float, scale: float, height: int) -> list[str]:
    parts: list[str] = []
    step_s = round_step(end_s / 10)
    for index in range(int(end_s / step_s) + 1):
        x = _LABEL_WIDTH + index * step_s * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{height - 4}" y2="{height + 2}"/>')
        label = f"{index * step_s:g} s"
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height + 16}" text-anchor="middle">{label}</text>')
    return parts
