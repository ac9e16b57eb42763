"""Reading single cells of a trace, with errors that say where."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path

from gpuslice.errors import UsageError


class TraceError(UsageError):
    """A trace is not what its format says; the message names file, line and column."""


class Row:
    """One line of a trace, by column name.

    Parameters
    ----------
    path, line
        File and line of the row, for messages; lines count from 1.
    cells
        Text by column.
    """

    __slots__ = ("_cells", "_line", "_path")

    def __init__(self, path: Path, line: int, cells: Mapping[str, str | None]) -> None:
        self._path = path
        self._line = line
        self._cells = cells

    @property
    def line(self) -> int:
        """Return the number of the row's line."""
        return self._line

    def error(self, column: str, what: str, remedy: str = "") -> TraceError:
        """Return an error about ``column`` of this row."""
        return TraceError(f"{self._path}, line {self._line}, column {column!r}: {what}", remedy)

    def has(self, column: str) -> bool:
        """Return True if the cell holds anything."""
        return bool(self._cells.get(column))

    def text(self, column: str) -> str:
        """Return the cell's text."""
        value = self._cells.get(column)
        if value is None or value == "":
            raise self.error(column, "nothing there")
        return value

    def seconds(self, column: str) -> float:
        """Return the cell as a time or duration in seconds, finite and not negative."""
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            raise self.error(column, f"{text!r} is not a number") from None
        if not isfinite(value) or value < 0:
            raise self.error(column, f"{text} is not a time", "seconds are finite and not negative")
        return value

    def above_zero(self, column: str) -> float:
        """Return the cell as a finite number above 0."""
        value = self.seconds(column)
        if not value > 0:
            raise self.error(column, f"{self.text(column)} is not above 0")
        return value

    def share(self, column: str) -> float | None:
        """Return the cell as a number from 0 to 1; None for an empty cell."""
        if not self.has(column):
            return None
        value = self.seconds(column)
        if value > 1:
            raise self.error(column, f"{self.text(column)} is not a share", "write a number from 0 to 1")
        return value

    def count(self, column: str, least: int = 0) -> int:
        """Return the cell as a whole number of at least ``least``."""
        text = self.text(column)
        try:
            value = int(text) if text.lstrip("+-").isdigit() else float(text)
        except ValueError:
            raise self.error(column, f"{text!r} is not a number") from None
        if value != int(value) if isfinite(value) else True:
            raise self.error(column, f"{text} is not a whole number")
        if value < least:
            raise self.error(column, f"{text} is less than {least}")
        return int(value)
