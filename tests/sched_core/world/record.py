"""What happens in a world, as somebody sees it who looks at the ranks and at nothing else."""

from __future__ import annotations

from typing import NamedTuple

from .loop import Loop


class Entry(NamedTuple):
    """Something that happened to a job."""

    when_s: float
    job: str
    attempt: int
    what: str
    said: object


class Violation(AssertionError):
    """Something has happened that must not."""


class Record:
    """Everything that has happened, in order.

    Attributes
    ----------
    faults
        What went wrong with a job before its processes were there.
    boundaries
        Passed by all ranks together.
    progress_s
        When one was passed last.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.entries: list[Entry] = []
        self.told: list[Entry] = []
        self.faults: set[tuple[str, str]] = set()
        self.boundaries = 0
        self.violation: Violation | None = None
        self.progress_s = 0.0

    def note(self, job: str, attempt: int, what: str, said: object = "") -> None:
        """Write down what has happened."""
        self.entries.append(Entry(self._loop.now_s, job, attempt, what, said))

    def tell(self, job: str, what: str) -> None:
        """People were told something of ``job``; for the end of errors only."""
        self.told.append(Entry(self._loop.now_s, job, 0, f"({what})", ""))

    def passed(self) -> None:
        """A rank has passed a boundary."""
        self.boundaries += 1
        self.progress_s = self._loop.now_s

    def of(self, job: str) -> list[tuple[int, str, object]]:
        """Return what happened to ``job``, without the moments."""
        return [(entry.attempt, entry.what, entry.said) for entry in self.entries if entry.job == job]

    def violated(self, what: str, *names: object) -> Violation:
        """Return the error for something that must not happen, with what came before it."""
        all_of_it = sorted([*self.entries, *self.told], key=lambda entry: entry.when_s)[-30:]
        past = "\n".join(f"  {e.when_s:8.3f} {e.job}.{e.attempt} {e.what} {e.said}" for e in all_of_it)
        found = ", ".join(map(str, names))
        violation = Violation(f"{what}: {found} at {self._loop.now_s:.3f} s, after\n{past}")
        self.violation = self.violation or violation
        return violation

    def check(self) -> None:
        """Raise the first violation, also if somebody has caught it."""
        if self.violation is not None:
            raise self.violation
