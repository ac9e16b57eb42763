"""The live objects of the process, as the garbage collector knows them.

Importing torch leaves some 300,000 objects behind, and other libraries as many again. Looking at them would
take most of a sweep's time. So they are set aside (``gc.freeze``) before the script makes anything; the
collector and every search of the heap then skip them. docs/decisions/sweep.md says why nothing is missed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Set
from contextlib import contextmanager
from itertools import compress
from typing import Any


class _FreezeProbe:
    """An object that every search of the heap must find. If it is not found, the script froze the heap.

    ``gc.get_freeze_count()`` would tell, too, but it walks through all frozen objects.
    """


# A script may have frozen its objects before it imported us.
gc.unfreeze()
_probe = _FreezeProbe()


def hide_imports() -> None:
    """Freeze all live objects. Call it after torch is imported, before the script makes a tensor."""
    global _probe
    gc.freeze()
    _probe = _FreezeProbe()


@contextmanager
def uncollected() -> Iterator[None]:
    """Run the block without automatic collection: a search makes thousands of objects that are no garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def look(*kinds: type) -> list[list[Any]]:
    """Return for each kind its live objects, subclasses included, except objects that imports made.

    Objects that the script froze are thawed first, and hidden imports with them.
    """
    gc.collect(1)  # so that young garbage is not saved
    families = [family(kind) for kind in kinds]
    types = frozenset({_FreezeProbe}).union(*families)
    found = _of(gc.get_objects(), types)
    if _FreezeProbe not in map(type, found):
        gc.unfreeze()
        found = _of(gc.get_objects(), types)
    return [_of(found, family) for family in families]


def thaw() -> None:
    """Make the next searches find frozen objects, too. These searches take longer."""
    gc.unfreeze()


def referrers(item: object) -> list[object]:
    """Return every object that refers to ``item``. Frozen objects are thawed first."""
    thaw()
    return gc.get_referrers(item)


def _of(objects: list[Any], types: Set[type]) -> list[Any]:
    """Return the live objects whose type is exactly one of ``types``."""
    return list(compress(objects, map(types.__contains__, map(type, objects))))


def family(kind: type) -> frozenset[type]:
    """Return a type and all of its subclasses."""
    return frozenset({kind}).union(*map(family, type.__subclasses__(kind)))
