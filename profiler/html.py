"""Common parts of the HTML pages: one self-contained file, light or dark, tables, colours."""

from __future__ import annotations

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
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; } .faint { color: var(--faint); }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .group { fill: var(--faint); font-weight: 600; } svg .tick { fill: var(--faint); }
svg .row { fill: var(--row); } svg .grid { stroke: var(--line); stroke-width: 1; }
svg .bar:hover { stroke: var(--ink); stroke-width: 1.5; }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: .5rem 0; padding: 0; list-style: none; }
.key svg { display: inline-block; width: 14px; height: 14px; vertical-align: -2px; margin-right: .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; } th, td { padding: .3rem .75rem .3rem 0; text-align: right; }
th { font-weight: 600; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
td { border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
figure { margin: 0; } td { white-space: nowrap; }
.pair { display: grid; gap: 1rem 2rem; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); }
h3 { font-size: .95rem; margin: 1rem 0 .25rem; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .job { fill: none; } svg .job:hover { stroke: var(--ink); }
.off { opacity: .4; text-decoration: line-through; } button { all: unset; cursor: pointer; }
button:focus-visible { outline: 2px solid var(--faint); }
code { font-size: .92em; } .good { color: var(--good); } .bad { color: var(--bad); }
"""


class Good(str):
    """A table cell in the colour of good news."""

    __slots__ = ()


class Bad(str):
    """A table cell in the colour of bad news."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Table:
    """A table; ``Good`` and ``Bad`` cells are coloured."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


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
    """Return ``table`` as HTML, under its title. Wide tables scroll."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    rows = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in table.rows)
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<h2>{escape(table.title)}</h2><div class="scroll">{body}</div>'


def _cell(cell: str) -> str:
    news = ' class="good"' if isinstance(cell, Good) else ' class="bad"' if isinstance(cell, Bad) else ""
    return f"<td{news}>{escape(cell)}</td>"


def swatch(colour: str, opacity: float = 1.0) -> str:
    """Return a square in a colour, for a key."""
    square = f'<rect width="14" height="14" rx="2" fill="{colour}" fill-opacity="{opacity}"/>'
    return f'<svg viewBox="0 0 14 14" aria-hidden="true">{square}</svg>'


def colour_key(entries: Iterable[tuple[str, str]]) -> str:
    """Return the key of a picture: a swatch and a name for each entry."""
    return f'<ul class="key">{"".join(f"<li>{drawn}{escape(name)}</li>" for drawn, name in entries)}</ul>'


def round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below ``least``."""
    power = 1e-6
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10
