"""A step that fails is undone; an undo that fails says so."""

from __future__ import annotations

import pytest

from gpuslice.errors import RollbackError
from gpuslice.kernels.undo import undone_by


def test_what_succeeds_is_not_undone() -> None:
    undone: list[int] = []
    with undone_by(lambda: undone.append(1), "a step"):
        pass
    assert undone == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_any_error_is_undone_and_raised_as_it_came(error: type[BaseException]) -> None:
    undone: list[int] = []
    with pytest.raises(error), undone_by(lambda: undone.append(1), "a step"):
        raise error
    assert undone == [1]


def test_an_undo_that_fails_is_an_error_that_names_both() -> None:
    def undo() -> None:
        raise KeyboardInterrupt("second")

    message = r"a step failed \(first\) and undoing it, too \(second\)"
    with pytest.raises(RollbackError, match=message), undone_by(undo, "a step"):
        raise RuntimeError("first")
