"""Common parts of the HTML pages: one self-contained file, light or dark, tables, colours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

#: Colours that people with any common colour blindness can tell apart (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")

STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --faint: #6b7280; --line: #d8dce3; --paper: #ffffff;
        --row: #f3f5f8; --good: #0a7d4f; --bad: #c62828; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ec; --faint: #9aa3b0; --line: #3a4150; --paper: #14171c; --row: #1d222a;
          --good: #4cc38a; --bad: #ff7b72; }
}
body { margin: 2rem auto; max-width: 1140px; padding: 0 1rem; background: var(--paper); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
h3 { font-size: .95rem; margin: 1rem 0 .25rem; }
p { margin: .25rem 0; max-width: 48rem; } .faint { color: var(--faint); font-size: .92em; }
figure { margin: 0; min-width: 0; }
svg { display: block; } svg.plot { overflow: visible; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .group { fill: var(--faint); font-weight: 600; } svg .tick { fill: var(--faint); }
svg .row { fill: var(--row); } svg .grid { stroke: var(--line); stroke-width: 1; }
svg .bar:hover { stroke: var(--ink); stroke-width: 1.5; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .job { fill: none; } svg .job:hover { stroke: var(--ink); }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: .5rem 0; padding: 0; list-style: none; }
.key svg { display: inline-block; width: 14px; height: 14px; vertical-align: -2px; margin-right: .4rem; }
.key svg.sample { width: 22px; }
.pair { display: grid; gap: .5rem 2rem;
        grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem 1.75rem .3rem 0;
         text-align: left; vertical-align: top; }
th { font-weight: 600; overflow-wrap: normal; vertical-align: bottom; }
th:last-child, td:last-child { padding-right: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.heat td { min-width: 2.8rem; border: 1px solid var(--paper); } .heat th { font-weight: 400; }
.heat td, .heat th.number { padding: .5rem .6rem; text-align: center; }
.good { color: var(--good); } .bad { color: var(--bad); }
.off { opacity: .4; text-decoration: line-through; } button { all: unset; cursor: pointer; }
button:focus-visible { outline: 2px solid var(--faint); }
@media (min-width: 641px) { td.number { white-space: nowrap; } }
@media (max-width: 1100px) { th, td { padding-right: 1.1rem; } }
@media (max-width: 640px) {
  body { margin: 1rem auto; font-size: 14px; } h1 { font-size: 1.25rem; }
  th, td { font-size: 12px; line-height: 1.35; padding-right: .45rem; }
}
"""


class Good(str):
    """A table cell in the colour of good news."""

    __slots__ = ()


class Bad(str):
    """A table cell in the colour of bad news."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Table:
    """A table; ``Good`` and ``Bad`` cells are coloured. The ``note`` explains it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def document(title: str, lead: Sequence[str], parts: Iterable[str], script: str = "") -> str:
    """Return a whole page.

    Parameters
    ----------
    title, lead
        Headline and the paragraphs under it, as text.
    parts
        The rest, as HTML.
    script
        JavaScript to run at the end.
    """
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(paragraph)}</p>" for paragraph in lead),
    ]
    foot = [f"<script>{script}</script>"] if script else []
    return "\n".join([*head, *parts, *foot, "</body></html>"])


def render_table(table: Table) -> str:
    """Return ``table`` as HTML, under its title. Columns of numbers are aligned on the right."""
    columns = range(len(table.header))
    numbers = [bool(table.rows) and all(_is_number(row[at]) for row in table.rows) for at in columns]
    head = "".join(
        f"<th{_classes(number=number)}>{escape(cell)}</th>"
        for cell, number in zip(table.header, numbers, strict=True)
    )
    rows = "".join(
        f"<tr>{''.join(_cell(cell, number) for cell, number in zip(row, numbers, strict=True))}</tr>"
        for row in table.rows
    )
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    note = f'<p class="faint">{escape(table.note)}</p>' if table.note else ""
    return f'<h2>{escape(table.title)}</h2>{note}<div class="scroll">{body}</div>'


#: A word longer than this may be broken after one of these.
_LONG = 24
_SEAM = re.compile(r"(?<=[/_=,])(?=\w)")
#: A number, an interval, or a sign that there is none.
_NUMBER = re.compile(r"|–|[−+-]?[\d.,]+(e[+-]?\d+)?( ?%)?( to [\d.,]+)?")


def _is_number(cell: str) -> bool:
    return _NUMBER.fullmatch(cell) is not None


def _cell(cell: str, number: bool) -> str:
    news = "good" if isinstance(cell, Good) else "bad" if isinstance(cell, Bad) else ""
    return f"<td{_classes(news, number=number)}>{_breakable(cell)}</td>"


def _breakable(cell: str) -> str:
    """Return a cell's text, in which a line may end within long paths and options."""
    return "<wbr>".join(escape(part) for part in _SEAM.split(cell)) if len(cell) > _LONG else escape(cell)


def _classes(*names: str, number: bool) -> str:
    known = [*filter(None, names), *(["number"] if number else [])]
    return f' class="{" ".join(known)}"' if known else ""


def swatch(colour: str, opacity: float = 1.0) -> str:
    """Return a square in a colour, for a key."""
    square = f'<rect width="14" height="14" rx="2" fill="{colour}" fill-opacity="{opacity}"/>'
    return f'<svg viewBox="0 0 14 14" aria-hidden="true">{square}</svg>'


def colour_key(entries: Iterable[tuple[str, str]]) -> str:
    """Return the key of a picture: a swatch and a name for each entry."""
    return f'<ul class="key">{"".join(f"<li>{drawn}{escape(name)}</li>" for drawn, name in entries)}</ul>'
