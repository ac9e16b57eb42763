"""The live objects of the process, as the garbage collector shows them.

Importing torch leaves some 300,000 objects behind, other libraries as many again, and looking at them would
be most of a sweep's time. So they are set aside (``gc.freeze``) before the script makes anything; the
collector and every look at the heap pass them over. Why nothing is missed is said in docs/decisions/sweep.md.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Set
from contextlib import contextmanager
from itertools import compress
from typing import Any


class _FreezeProbe:
    """An object that must be seen in every look at the heap; if it is not, the script froze the heap.

    ``gc.get_freeze_count()`` would tell, too, but it walks through all frozen objects.
    """


# A script may have frozen its objects before it imported us.
gc.unfreeze()
_probe = _FreezeProbe()


def hide_imports() -> None:
    """Freeze all that is alive: once torch is imported, and as long as the script has made no tensor."""
    global _probe
    gc.freeze()
    _probe = _FreezeProbe()


@contextmanager
def uncollected() -> Iterator[None]:
    """Without collections by themselves: whoever looks makes thousands of objects that are no garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def look(*kinds: type) -> list[list[Any]]:
    """For each kind the live objects of it, or of types derived from it, but for hidden imports.

    Objects that the script froze are thawed first, and hidden imports with them.
    """
    gc.collect(1)  # young garbage need not be saved
    families = [family(kind) for kind in kinds]
    types = frozenset({_FreezeProbe}).union(*families)
    found = _of(gc.get_objects(), types)
    if _FreezeProbe not in map(type, found):
        gc.unfreeze()
        found = _of(gc.get_objects(), types)
    return [_of(found, family) for family in families]


def thaw() -> None:
    """Have the next looks find what is frozen, too; they take longer."""
    gc.unfreeze()


def referrers(item: object) -> list[object]:
    """Every object that refers to ``item``, frozen ones, which are thawed, among them."""
    thaw()
    return gc.get_referrers(item)


def _of(objects: list[Any], types: Set[type]) -> list[Any]:
    """Those of exactly these types."""
    return list(compress(objects, map(types.__contains__, map(type, objects))))


def family(kind: type) -> frozenset[type]:
    """A type and everything derived from it."""
    return frozenset({kind}).union(*map(family, type.__subclasses__(kind)))
