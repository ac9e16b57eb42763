"""Undoing a step that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpuslice.errors import RollbackError


@contextmanager
def undoing(error: BaseException, step: str) -> Iterator[None]:
    """Undo a failed step; a failure of the undo is raised instead of ``error`` and names both."""
    try:
        yield
    except BaseException as failure:  # noqa: BLE001 - whatever it is, the state is not whole
        raise RollbackError(
            f"{step} failed ({error}) and undoing it, too ({failure})",
            "end the process and restart the job from its snapshot",
        ) from error
