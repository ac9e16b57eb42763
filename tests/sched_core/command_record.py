"""What the core orders in the scenarios of the tests, kept as one digest a test.

A change that is to leave the core's behaviour alone leaves every digest as it is. One that changes it on
purpose makes them anew and says why:

    python tests/sched_core/record_commands.py [FILE ...]
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from gpuslice.errors import IllegalTransitionError, UsageError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.lifecycle.events import Command, Event

_HERE = Path(__file__).resolve().parent
PATH = _HERE.parent / "data" / "oracles" / "commands.json"
#: Where the digests go that are made anew, by test; absent: they are compared with those of ``PATH``.
RECORDED: pytest.StashKey[dict[str, str]] = pytest.StashKey()
_DIGITS = 16
#: Where a policy has failed, in the words of ``errors.where_raised``: no matter.
_RAISED = re.compile(rb" \([^()]*, line \d+\)")

Digests = dict[str, str]


def name_of(test: pytest.Item) -> str:
    """Return the key of ``test``: its file within this folder, and its name."""
    return f"{test.path.relative_to(_HERE)}::{test.name}"


def read() -> Digests:
    """Return the digests that were recorded, by test."""
    found: Digests = json.loads(PATH.read_text())
    return found


def write(digests: Digests) -> None:
    """Keep ``digests``, one a line, so that two changes of different tests merge."""
    PATH.write_text(json.dumps(digests, indent=0, sort_keys=True) + "\n")


class CommandRecord:
    """The digest of what every core of one test has ordered, event by event, and what it has refused."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.events = 0

    @property
    def digest(self) -> str:
        """The digest so far; empty if no event was handled."""
        return self._digest.hexdigest()[:_DIGITS] if self.events else ""

    def add(self, answer: list[Command] | Exception) -> None:
        """Take in the answer of a core to one event."""
        self.events += 1
        said = [type(answer).__name__, str(answer)] if isinstance(answer, Exception) else answer
        self._digest.update(_RAISED.sub(b"", msgspec.json.encode(said)) + b"\n")


@contextmanager
def recorded() -> Iterator[CommandRecord]:
    """Record what all cores order meanwhile."""
    record, handle = CommandRecord(), Core.handle

    def handle_and_record(core: Core, event: Event, now: float) -> list[Command]:
        try:
            commands = handle(core, event, now)
        except (IllegalTransitionError, UsageError) as error:
            record.add(error)
            raise
        record.add(commands)
        return commands

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Core, "handle", handle_and_record)
        yield record
