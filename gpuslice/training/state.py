"""``job.state``: a script's own variables, saved with each snapshot and put back at a restart."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Container, Mapping
from typing import Any

from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.named.describe import is_holder
from gpuslice.checkpoint.named.state import OWN_PREFIX, describe, plain_value
from gpuslice.errors import RefusedSnapshotError, UsageError

#: The entry of a snapshot that lists the names.
NAMES = f"{OWN_PREFIX}state"


class State(UserDict[str, Any]):
    """A mapping of plain values and tensors, which gets new names at any time.

    Parameters
    ----------
    values
        What it holds at first, which can be saved.
    attached
        Names of attached objects, which it cannot have, too.

    Raises
    ------
    UsageError
        Naming what cannot be saved, when it is set. What is put into a container later is looked at when the
        next snapshot is taken.
    """

    def __init__(self, values: Mapping[str, object], attached: Container[str] = ()) -> None:
        self._attached = attached
        super().__init__()
        self.data = dict(values)  # attached lists may have modules in them

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or name.startswith(OWN_PREFIX):
            raise UsageError(f"job.state cannot have the name {name!r}", "choose another text")
        if name in self._attached:
            raise UsageError(
                f"{name!r} is the name of an attached object", "choose another one for job.state"
            )
        _refuse_objects(value, f"job.state[{name!r}]")
        describe({f"job.state[{name!r}]": value})
        super().__setitem__(name, value)

    def named(self) -> dict[str, object]:
        """Return the entries of a snapshot."""
        return {**self.data, NAMES: tuple(self.data)}


def saved_names(snapshot: SnapshotFile) -> tuple[str, ...]:
    """Return the names that ``job.state`` had when a snapshot was taken.

    Raises
    ------
    RefusedSnapshotError
        If the file says something else.
    """
    names = plain_value(snapshot, NAMES) or ()
    own = [name for name in names if not isinstance(name, str) or name.startswith(OWN_PREFIX)]
    if not isinstance(names, tuple) or own:
        raise RefusedSnapshotError(
            f"{snapshot.path} has impossible names of job.state", "use another snapshot"
        )
    return names


def _refuse_objects(value: object, path: str) -> None:
    """Raise ``UsageError`` for what only ``attach`` can save: it is loaded in place."""
    if is_holder(value):
        raise UsageError(
            f"{path} is a {type(value).__qualname__}", "give it to gpuslice.attach; or its state_dict() here"
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_objects(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple, deque)):
        for index, item in enumerate(value):
            _refuse_objects(item, f"{path}[{index}]")
