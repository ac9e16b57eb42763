"""Traces of processes that have a job's name and have attached nothing: a small file in the job's store.

Such a process leaves no snapshot when it is killed. The trace tells the next one why it starts from the
beginning.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from gpuslice.checkpoint.files import store_directory

from .budget import Budget

_NAME = "unattached"


class StartTraces:
    """The traces, in one RAM disk, of named jobs that have attached nothing yet; made by ``RamDisk``."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def leave(self, store: Path, run: str) -> float | None:
        """Leave a trace of this run. Return when another run left the trace before, in seconds since 1970.

        Parameters
        ----------
        run
            Identifies the run that the process belongs to.
        """
        trace = store / _NAME
        with self._budget.lock():
            store_directory(store)
            other = trace.exists() and trace.read_text() != run
            former_s = trace.lstat().st_mtime if other else None
            trace.unlink(missing_ok=True)
            trace.touch(mode=0o600)
            trace.write_text(run)
        return former_s

    def remove(self, store: Path) -> None:
        """Remove a trace, and the store's directory if nothing else is in it."""
        with self._budget.lock():
            (store / _NAME).unlink(missing_ok=True)
            with suppress(OSError):  # it does not exist, or is not empty
                store.rmdir()
