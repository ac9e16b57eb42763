"""Find classes by the name that a snapshot gives; only classes that the process has loaded are found.

Nothing is imported and no code of a class runs. A class counts only if its objects are plain data: a named
tuple, a data class, an enumeration, or a container.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from enum import Enum
from typing import Any

from gpuslice.errors import RefusedSnapshotError

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def name_of(kind: type) -> str:
    """Return the name by which `find` looks for a class: ``module:Outer.Inner``."""
    return f"{kind.__module__}:{kind.__qualname__}"


def with_article(value: object) -> str:
    """Return the class of a value for a message: "a Foo", "an Item"."""
    name = type(value).__qualname__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


def is_plain_data(kind: type) -> bool:
    """Return True if objects of the class are data and nothing more."""
    data = issubclass(kind, (*_CONTAINERS, Enum)) or dataclasses.is_dataclass(kind)
    return data and not hasattr(kind, "__del__")


def find(name: str, live: object, path: str) -> type:
    """Return the class with a name: that of the live object, or one that the process has loaded.

    Raises
    ------
    RefusedSnapshotError
        If there is none whose objects are plain data.
    """
    kind = type(live) if name_of(type(live)) == name else _loaded(name)
    if kind is None or not is_plain_data(kind):
        raise RefusedSnapshotError(
            f"{path} was saved as a {name}, which is no class of plain data here",
            "define the class before gpuslice.attach, at the top of a module",
        )
    return kind


def _loaded(name: str) -> type | None:
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        try:
            found = vars(found)[part]
        except (KeyError, TypeError):
            return None
    return found if isinstance(found, type) and name_of(found) == name else None
