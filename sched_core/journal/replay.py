"""Replay a journal: give its events to a core, which becomes the core that wrote it.

An event that the core rejects, or that today's types do not allow (an older version may have written it), is
set aside by its number, and the rest goes on. The scheduler records that in the journal, so that every later
replay leaves out the same events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gpuslice.errors import GpusliceError, UsageError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.lifecycle.events import Command, Event, Noted, Plain, job_of, named
from gpuslice.types import shortened

from .journal import UNREADABLE, Journal

#: Name of the note about an event that was set aside.
SET_ASIDE = "set_aside"
_REASON_CHARACTERS = 1000
_log = logging.getLogger(__name__)


class SetAside(NamedTuple):
    """An event of the journal that the core has not accepted, and why."""

    number: int
    event: str
    job: str
    reason: str

    def noted(self) -> Noted:
        """Return the journal entry that records that this event was set aside."""
        details: dict[str, Plain] = {"number": self.number, "event": self.event, "reason": self.reason}
        return Noted(SET_ASIDE, self.job, details)


class Replay:
    """A replay of ``journal`` into ``core``.

    Parameters
    ----------
    make_core
        Makes another core like ``core`` was in the beginning: an unexpected error may have left it
        in the midst of something.

    Attributes
    ----------
    rejected
        What was set aside, by number; not what the journal says had been set aside before.
    """

    def __init__(self, journal: Journal, core: Core, make_core: Callable[[], Core]) -> None:
        self.rejected: dict[int, SetAside] = {}
        self._journal = journal
        self._core = core
        self._make_core = make_core
        self._left_out = {int(note.details["number"] or 0) for note in journal.notes(SET_ASIDE)}
        self._number = 0

    def advance(self) -> Iterator[tuple[Event, float, Sequence[Command]]]:
        """Yield the events added since, with their times and the commands that followed from them."""
        for number, at_s, event in self._journal.entries(self._number):
            self._number = number
            if number in self._left_out:
                continue
            try:
                _check_readable(event)
                commands = self._core.handle(event, at_s)
            except GpusliceError as error:
                self._set_aside(number, event, error.message)
            except Exception as error:  # noqa: BLE001 - set aside by name, logged
                _log.exception("event %d of the journal, a %s, failed", number, type(event).__name__)
                self._set_aside(number, event, f"{type(error).__name__}: {error}")
                self.repeat(number)
            else:
                yield event, at_s, commands

    def repeat(self, until: int | None = None) -> None:
        """Make a new core from all events (before number ``until``) that were not set aside."""
        core = self._make_core()
        for number, at_s, event in self._journal.entries(0):
            if until is not None and number >= until:
                break
            if number not in self._left_out:
                core.handle(event, at_s)
        self._core.become(core)

    def _set_aside(self, number: int, event: Event, reason: str) -> None:
        reason = shortened(reason, _REASON_CHARACTERS)
        self.rejected[number] = SetAside(number, named(event), job_of(event), reason)
        self._left_out.add(number)


def _check_readable(event: Event) -> None:
    if isinstance(event, Noted) and event.what == UNREADABLE:
        raise UsageError(str(event.details["reason"]))
