"""What an arena remembers of the copy before, for the tests of delta."""

from __future__ import annotations


class Remembered:
    """Marks of an arena's last copy."""

    def __init__(self) -> None:
        self.marks: dict[int, int] = {}

    def __call__(self, offset: int, mark: int) -> bool:
        known = self.marks.get(offset) == mark
        self.marks[offset] = mark
        return known
