"""A scheduler's journal, read beside the scheduler and replayed through a core of the same make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from gpuslice.daemon import Setup
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.sched_core.events import Command, Event
from gpuslice.sched_core.journal import FILE, Journal

_AT_ONCE = 500


class Story:
    """The story so far; a context manager.

    Parameters
    ----------
    directory
        The scheduler's.

    Raises
    ------
    EnvironmentUnusableError
        If no scheduler ever ran there.
    JournalError
        If its journal cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._journal = Journal(directory / FILE, read_only=True)
        setup = self._journal.about()
        if setup is None:
            self._journal.close()
            raise EnvironmentUnusableError(f"no scheduler ever ran in {directory}")
        self.core = msgspec.json.decode(setup, type=Setup).make_core()
        self._number = 0

    def __enter__(self) -> Story:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()

    def advance(self) -> Iterator[tuple[Event, float, Sequence[Command]]]:
        """What was added since: events, when they happened, and what the scheduler did about them."""
        while part := self._journal.after(self._number, _AT_ONCE):
            for number, at_s, event in part:
                self._number = number
                yield event, at_s, self.core.handle(event, at_s)
