"""A scheduler's journal replayed through a core of the same make, whether the scheduler still runs or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from gpuslice.daemon.scheduler_setup import CORE_VERSION, Setup, read_setup
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.files import closed_directory
from gpuslice.sched_core.journal.journal import Journal
from gpuslice.sched_core.journal.replay import Replay, SetAside
from gpuslice.sched_core.lifecycle.events import Command, Event


class JournalReplay:
    """A replay of a journal into a new core, as far as it has come; a context manager.

    Parameters
    ----------
    path
        Path of the journal, as a rule ``sched_core.journal.FILE`` in the scheduler's directory.

    Attributes
    ----------
    core
        The core after the last event that ``advance`` has yielded.
    journal, setup
        What is replayed, and what the scheduler was started with.

    Raises
    ------
    EnvironmentUnusableError
        If there is none, this user may not read it, or another version of the core wrote it.
    JournalError
        If it cannot be read for another reason.
    """

    def __init__(self, path: Path) -> None:
        _check_readable(path)
        self.journal = Journal(path, read_only=True)
        try:
            self.setup = _read_setup(self.journal)
            self.core = self.setup.make_core()
        except BaseException:
            self.journal.close()
            raise
        self._replay = Replay(self.journal, self.core, self.setup.make_core)

    def __enter__(self) -> JournalReplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the journal."""
        self.journal.close()

    def advance(self) -> Iterator[tuple[Event, float, Sequence[Command]]]:
        """Yield the events that were added since, with their times and the scheduler's commands."""
        return self._replay.advance()

    @property
    def left_out(self) -> Mapping[int, SetAside]:
        """Return the events that the core has not accepted, by number."""
        return self._replay.rejected


def _check_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except PermissionError as error:
        whose = closed_directory(path.parent) or f"it belongs to user {path.stat().st_uid}"
        raise EnvironmentUnusableError(
            f"permission denied: {path} ({whose})", "name a directory of yours: --state-dir"
        ) from error
    except OSError as error:
        raise EnvironmentUnusableError(
            f"there is no journal {path}", "name the directory of a scheduler that was up: --state-dir"
        ) from error


def _read_setup(journal: Journal) -> Setup:
    """Return the setup that ``journal`` names.

    Raises
    ------
    EnvironmentUnusableError
        If it names none, or one with another core.
    """
    written = journal.about()
    if written is None:
        raise EnvironmentUnusableError(
            f"{journal.path} has no scheduler's options yet", "try again when the scheduler is up"
        )
    setup = read_setup(written)
    if setup.core_version != CORE_VERSION:
        raise EnvironmentUnusableError(
            f"another version of gpuslice wrote the journal {journal.path} "
            f"(core {setup.core_version}; this is core {CORE_VERSION})",
            "look at it with the version that wrote it",
        )
    return setup
