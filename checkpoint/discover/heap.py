"""What the garbage collector knows: the process's objects, without looking at the old ones again and again.

Importing torch leaves some 300,000 objects behind, and looking at them would be most of a sweep's time. The
collector can set objects aside (``gc.freeze``); it and every look at the heap then pass them over. So imports
are set aside before the script makes anything, and at a look all else that was seen: what was wanted of it is
remembered by weak references, and the next look only has to see what is new. Why that misses nothing, and why
garbage is still collected, is said in docs/decisions/sweep.md.
"""

from __future__ import annotations

import gc
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import is_not
from typing import Any

#: The collector of later versions goes through old objects little by little, without a full collection at
#: which ours could be given back to it.
_CAN_SET_ASIDE = sys.implementation.name == "cpython" and sys.version_info < (3, 14)


class _Witness:
    """An object that must be seen in every look at the heap; if it is not, the script froze the heap.

    ``gc.get_freeze_count()`` would tell, too, but it walks through all frozen objects.
    """


@dataclass(slots=True)
class Kind:
    """The objects of some types that were found.

    Attributes
    ----------
    references
        Of all that live, and of some that are gone; the oldest first.
    ids
        Likewise, by ``id``.
    """

    types: frozenset[type]
    references: list[weakref.ref[Any]] = field(default_factory=list)
    ids: set[int] = field(default_factory=set)

    def add(self, objects: list[object]) -> None:
        """Those of its types."""
        found = _of(objects, self.types)
        if not self.ids.isdisjoint(map(id, found)):
            # Thawed meanwhile, and so found again; or made where one was that is gone.
            known = set(map(id, self.alive()))
            found = [item for item in found if id(item) not in known]
        self.references += map(weakref.ref, found)
        self.ids.update(map(id, found))

    def alive(self) -> list[Any]:
        """Those that live."""
        objects = list(map(_call, self.references))
        alive = list(map(is_not, objects, repeat(None)))
        if not all(alive):
            objects = list(compress(objects, alive))
            self.references = list(compress(self.references, alive))
            if len(self.ids) > 2 * len(objects):
                self.ids = set(map(id, objects))
        return objects


# A script may have frozen its objects before it imported us.
gc.unfreeze()
_witness = _Witness()
#: By kind; of none as long as nothing is set aside.
_seen: dict[type, Kind] = {}
#: Whether the collector is off because of `uncollected`.
_paused = False


def hide_imports() -> None:
    """Freeze all that is alive, once torch is imported and before the script makes its first tensor."""
    global _witness, _seen
    gc.freeze()
    _witness, _seen = _Witness(), {}


@contextmanager
def uncollected() -> Iterator[None]:
    """Without collections by themselves: whoever looks makes thousands of objects that are no garbage.

    They would set off a full collection, which takes as long as all the rest and undoes what was set aside.
    """
    global _paused
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _paused = True
    try:
        yield
    finally:
        _paused = False
        gc.enable()


def look(*kinds: type) -> list[Kind]:
    """For each kind the live objects of it, or of types derived from it, but for hidden imports.

    Objects that the script froze are thawed first. Where the collector is off, or cannot be told in time
    to take everything back, nothing is set aside and every look sees all but what was set aside before.
    """
    families = {kind: _family(kind) for kind in kinds}
    set_aside = _CAN_SET_ASIDE and (gc.isenabled() or _paused)
    if set_aside:
        gc.collect(1)  # young garbage need not be looked at, and must not be set aside
    seen = _seen
    if seen and not all(kind in seen and types <= seen[kind].types for kind, types in families.items()):
        give_back()
        seen = {}
    seen = seen or {kind: Kind(types) for kind, types in families.items()}
    objects, witness = _take_all() if set_aside else (gc.get_objects(), None)
    found = _of(objects, {_Witness}.union(*(kind.types for kind in seen.values())))
    if _witness not in _of(found, {_Witness}):
        # The script froze something, or an earlier look did not come to its end. All that is thawed.
        give_back()
        seen, witness = {kind: Kind(types) for kind, types in families.items()}, None
        found = _of(gc.get_objects(), frozenset().union(*families.values()))
    for kind in seen.values():
        kind.add(found)
    if witness is not None:
        _remember(seen, witness)
    return [seen[kind] for kind in kinds]


#: As a C function, which ``map`` calls without going through the interpreter's loop.
_call: Callable[[Callable[[], Any]], Any] = operator.call


def _take_all() -> tuple[list[object], _Witness]:
    """All that is not frozen; and freeze exactly that. The witness is the first object made afterwards."""
    # From one C function into the other: no thread of the script's can do anything in between.
    steps: tuple[Callable[[], Any], ...] = (gc.get_objects, gc.freeze, _Witness)
    objects, _, witness = map(_call, steps)
    return objects, witness


def _of(objects: list[object], types: Set[type]) -> list[Any]:
    """Those of exactly these types."""
    return list(compress(objects, map(types.__contains__, map(type, objects))))


def _family(kind: type) -> frozenset[type]:
    """A type and everything derived from it."""
    return frozenset({kind}).union(*map(_family, type.__subclasses__(kind)))


def _remember(seen: dict[type, Kind], witness: _Witness) -> None:
    """From now on ``seen`` is what was set aside, provided that ``witness`` is seen."""
    global _witness, _seen
    # In this order: whoever looks after an interruption in between still misses the old witness.
    _seen = seen
    _witness = witness
    if _before_collection not in gc.callbacks:
        gc.callbacks.append(_before_collection)


def referrers(item: object) -> list[object]:
    """Every object that refers to ``item``, those that had been set aside among them."""
    give_back()  # the collector shows none of what is frozen
    return gc.get_referrers(item)


def give_back() -> None:
    """Let the collector have everything again."""
    global _seen
    gc.unfreeze()
    _seen = {}


def _before_collection(phase: str, info: dict[str, int]) -> None:
    """A full collection sees everything, as if nothing had been set aside."""
    if phase == "start" and info["generation"] == 2:
        if _seen:
            give_back()
        # What a signal's handler raises in here is lost, so this is there only while it is needed. Of a list
        # that Python is going through, only the last one can be removed.
        if gc.callbacks[-1] is _before_collection:
            gc.callbacks.pop()
