"""Undo a step that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpuslice.errors import RollbackError


@contextmanager
def undone_by(undo: Callable[[], object], step: str) -> Iterator[None]:
    """Run the block, and call ``undo`` if it fails. The block's exception is raised again.

    Raises
    ------
    RollbackError
        If the undo fails, too; names both failures, and the ``step``.
    """
    try:
        yield
    except BaseException as error:
        try:
            undo()
        except BaseException as failure:  # noqa: BLE001 - whatever it is, the state is not whole
            raise RollbackError(
                f"{step} failed ({error}) and undoing it, too ({failure})",
                "end the process and restart the job from its snapshot",
            ) from error
        raise
