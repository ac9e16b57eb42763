"""Text on a terminal: how many columns it takes, and its beginning if there are fewer."""

from __future__ import annotations

import unicodedata

#: Stands for what was cut off.
ELLIPSIS = "…"
#: East Asian widths that take two columns.
_WIDE = ("W", "F")
#: Categories that take no column: combining marks, and format characters.
_NO_COLUMN = ("Mn", "Me", "Cf")


def one_line(text: str) -> str:
    """Return ``text`` on one line, without what could move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))


def width(text: str) -> int:
    """Return how many terminal columns ``text`` takes. It has only printable characters."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def cut(text: str, columns: int) -> str:
    """Return ``text``, or its beginning and ``…`` if it takes more than ``columns``."""
    if width(text) <= columns:
        return text
    kept, left = [], columns - 1
    for letter in text:
        left -= _columns(letter)
        if left < 0:
            break
        kept.append(letter)
    return "".join(kept).rstrip() + ELLIPSIS if columns > 0 else ""


def cut_inside(text: str, columns: int) -> str:
    """Return ``text``, or its beginning and its end with ``…`` between them if it takes too many columns.

    Names of jobs often differ in their last letters alone.
    """
    if width(text) <= columns:
        return text
    end = cut(text[::-1], max(1, columns // 2))[-2::-1]
    return cut(text, columns - width(end)) + end


def padded(text: str, columns: int) -> str:
    """Return ``text`` with spaces behind it, so that it takes at least ``columns``."""
    return text + " " * (columns - width(text))


def _columns(letter: str) -> int:
    if unicodedata.category(letter) in _NO_COLUMN:
        return 0
    return 2 if unicodedata.east_asian_width(letter) in _WIDE else 1
