"""Attributes of Python objects: those in ``__dict__`` and in ``__slots__``."""

from __future__ import annotations

import copyreg
from typing import Any

#: CPython's flag of types whose instances' size does not include the dictionary.
_MANAGED_DICT = 1 << 4
_POINTER_BYTES = tuple.__itemsize__


def attributes(item: object) -> dict[str, Any]:
    """Return all attributes of the instance; those in slots come last."""
    found = dict(getattr(item, "__dict__", None) or {})
    for name in slot_names(type(item)):
        try:
            found[name] = object.__getattribute__(item, name)
        except AttributeError:
            continue
    return found


def set_attribute(item: object, name: str, value: object) -> None:
    """Set an attribute of the instance, without the class's own ``__setattr__`` and properties."""
    if name not in slot_names(type(item)) and hasattr(item, "__dict__"):
        vars(item)[name] = value
    else:
        object.__setattr__(item, name, value)


def delete_attribute(item: object, name: str) -> None:
    """Delete an attribute of the instance, if it has it."""
    if name in slot_names(type(item)):
        object.__delattr__(item, name)
    else:
        vars(item).pop(name, None)


def slot_names(kind: type) -> list[str]:
    """Return the names in ``__slots__`` of a class and its bases, as instances have them."""
    return list(copyreg._slotnames(kind))  # type: ignore[attr-defined]


def hides_nothing(item: object) -> bool:
    """Return True if the instance's attributes are its whole state, judged by the size of its class.

    A class of another language has memory of its own in each instance. ``object.__reduce_ex__`` tells by
    the same comparison what it can copy.
    """
    kind = type(item)
    nbytes = object.__basicsize__ + _POINTER_BYTES * len(slot_names(kind))
    if kind.__dictoffset__ and not kind.__flags__ & _MANAGED_DICT:
        nbytes += _POINTER_BYTES
    if kind.__weakrefoffset__ > 0:
        nbytes += _POINTER_BYTES
    return kind.__basicsize__ <= nbytes and kind.__itemsize__ == 0
