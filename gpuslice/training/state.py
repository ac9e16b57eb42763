"""``job.state``: a script's own variables, saved with each snapshot and put back at a restart."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Container, Mapping
from typing import Any

from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.named.describe import is_holder
from gpuslice.checkpoint.named.state import OWN_PREFIX, describe, plain_value
from gpuslice.errors import RefusedSnapshotError, UsageError

#: Name of the entry of a snapshot that lists the names in ``job.state``.
NAMES = f"{OWN_PREFIX}state"


class State(UserDict[str, Any]):
    """A mapping of names to plain values and tensors. Names can be added at any time.

    Parameters
    ----------
    values
        Its first entries. They must be values that can be saved.
    attached
        Names of attached objects, which it must not use.

    Raises
    ------
    UsageError
        If a value that cannot be saved is set. Values that are put into a container later are checked when
        the next snapshot is taken.
    """

    def __init__(self, values: Mapping[str, object], attached: Container[str] = ()) -> None:
        self._attached = attached
        super().__init__()
        self.data = dict(values)  # attached lists may have modules in them

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or name.startswith(OWN_PREFIX):
            raise UsageError(f"job.state cannot have the name {name!r}", "choose another name")
        if name in self._attached:
            raise UsageError(
                f"{name!r} is the name of an attached object", "choose another one for job.state"
            )
        _refuse_objects(value, f"job.state[{name!r}]")
        describe({f"job.state[{name!r}]": value})
        super().__setitem__(name, value)

    def named(self) -> dict[str, object]:
        """Return the entries that a snapshot saves, by name."""
        return {**self.data, NAMES: tuple(self.data)}


def saved_names(snapshot: SnapshotFile) -> tuple[str, ...]:
    """Return the names that ``job.state`` had when a snapshot was taken.

    Raises
    ------
    RefusedSnapshotError
        If the file's entry is no list of possible names.
    """
    names = plain_value(snapshot, NAMES) or ()
    own = [name for name in names if not isinstance(name, str) or name.startswith(OWN_PREFIX)]
    if not isinstance(names, tuple) or own:
        raise RefusedSnapshotError(
            f"{snapshot.path} has impossible names of job.state", "use another snapshot"
        )
    return names


def _refuse_objects(value: object, path: str) -> None:
    """Raise ``UsageError`` if ``value`` holds an object, such as a module, that only ``attach`` can save."""
    if is_holder(value):
        raise UsageError(
            f"{path} is a {type(value).__qualname__}, which job.state cannot save",
            "attach it, or keep its state_dict() here",
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_objects(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple, deque)):
        for index, item in enumerate(value):
            _refuse_objects(item, f"{path}[{index}]")
