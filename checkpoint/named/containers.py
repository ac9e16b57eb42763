"""Loaded lists and dicts put into the live ones, so that their types and everybody's references stay."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import MutableMapping, MutableSequence
from typing import Any

from .snapshot_tensors import Maker

#: Containers that do not look at what is put into them.
_INDIFFERENT = (type(None), dict, list, tuple, OrderedDict, defaultdict, deque)


def refill(live: Any, value: Any) -> Any:
    """Put a loaded container into the live one, so that its type and everybody's references stay."""
    if isinstance(live, MutableMapping) and isinstance(value, dict):
        live.clear()
        live.update(value)
        return live
    if isinstance(live, MutableSequence) and isinstance(value, list):
        live.clear()
        live.extend(value)
        return live
    if isinstance(live, tuple) and isinstance(value, tuple) and hasattr(live, "_fields"):
        return type(live)(*value)
    return value


def refill_settled(maker: Maker, live: Any, value: Any) -> Any:
    """`refill`; a container of the user's own may look at what it is given."""
    if type(live) not in _INDIFFERENT:
        maker.settle()
    return refill(live, value)
