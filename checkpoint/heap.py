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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any

#: The collector of later versions goes through old objects little by little, without a full collection at
#: which ours could be given back to it.
_CAN_SET_ASIDE = sys.implementation.name == "cpython" and sys.version_info < (3, 14)


class _Witness:
    """An object that must be seen in every look at the heap; if it is not, the script froze the heap.

    ``gc.get_freeze_count()`` would tell, too, but it walks through all frozen objects.
    """


@dataclass(slots=True)
class _Seen:
    """What was wanted of the objects that were set aside, and their ids; of some that are gone, too."""

    types: frozenset[type]
    references: list[weakref.ref[Any]] = field(default_factory=list)
    ids: set[int] = field(default_factory=set)
    notes: dict[object, Any] = field(default_factory=dict)

    def add(self, found: list[object]) -> None:
        """``TypeError``: one of them cannot be remembered."""
        if not self.ids.isdisjoint(map(id, found)):
            # Thawed meanwhile, and so found again; or made where one was that is gone.
            known = set(map(id, self.alive(self.types)[0]))
            found = [item for item in found if id(item) not in known]
        self.references += map(weakref.ref, found)
        self.ids.update(map(id, found))

    def alive(self, *families: Set[type]) -> list[list[Any]]:
        objects = list(map(_call, self.references))
        alive = _parted(objects, families)
        if self.types.issubset(set().union(*families)) and 2 * sum(map(len, alive)) < len(objects):
            present = [item for item in objects if item is not None]
            self.references, self.ids = list(map(weakref.ref, present)), set(map(id, present))
        return alive


# A script may have frozen its objects before it imported us.
gc.unfreeze()
_witness = _Witness()
_seen: _Seen | None = None
#: Whether the collector is off because of `uncollected`.
_paused = False


def hide_imports() -> None:
    """Freeze all that is alive, once torch is imported and before the script makes its first tensor."""
    global _witness, _seen
    gc.freeze()
    _witness, _seen = _Witness(), None


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


def instances(*families: Set[type]) -> list[list[Any]]:
    """For each set of types every live object of exactly these types, but for hidden imports.

    Objects that the script froze are thawed first. Where the collector is off, or cannot be told in time
    to take everything back, nothing is set aside and every look sees all but what was set aside before.
    """
    types: frozenset[type] = frozenset().union(*families)
    set_aside = _CAN_SET_ASIDE and (gc.isenabled() or _paused)
    if set_aside:
        gc.collect(1)  # young garbage need not be looked at, and must not be set aside
    if _seen is not None and not types <= _seen.types:
        give_back()
    seen = _seen or _Seen(types)
    objects, witness = _take_all() if set_aside else (gc.get_objects(), None)
    found, undisturbed = _of_types(objects, seen.types)
    if undisturbed:
        try:
            seen.add(found)
        except TypeError:  # of a type without weak references
            undisturbed = False
    if not undisturbed:
        # The script froze something, or an earlier look did not come to its end. All that is thawed.
        give_back()
        return _parted(gc.get_objects(), families)
    if witness is not None:
        _remember(seen, witness)
    return seen.alive(*families)


#: As a C function, which ``map`` calls without going through the interpreter's loop.
_call: Callable[[Callable[[], Any]], Any] = operator.call


def _take_all() -> tuple[list[object], _Witness]:
    """All that is not frozen; and freeze exactly that. The witness is the first object made afterwards."""
    # From one C function into the other: no thread of the script's can do anything in between.
    steps: tuple[Callable[[], Any], ...] = (gc.get_objects, gc.freeze, _Witness)
    objects, _, witness = map(_call, steps)
    return objects, witness


def _of_types(objects: list[object], types: Set[type]) -> tuple[list[object], bool]:
    """Those of the types; and whether the witness is among ``objects``."""
    with_witness = {*types, _Witness}
    found = list(compress(objects, map(with_witness.__contains__, map(type, objects))))
    wanted, witnesses = _parted(found, (types, {_Witness}))
    return wanted, bool(witnesses) and witnesses[0] is _witness


def _parted(objects: list[object], families: Iterable[Set[type]]) -> list[list[Any]]:
    """Those of each set of types."""
    kinds = list(map(type, objects))
    return [list(compress(objects, map(family.__contains__, kinds))) for family in families]


def _remember(seen: _Seen, witness: _Witness) -> None:
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


def notes() -> dict[object, Any]:
    """What others remember of the objects that are remembered here, just as long as these are.

    Each has a method ``references`` for the weak references by which it knows them.
    """
    return {} if _seen is None else _seen.notes


def own_references() -> Mapping[int, int]:
    """Ids of the weak references that are kept here or noted, and how many times each is."""
    if _seen is None:
        return {}
    noted = (note.references() for note in _seen.notes.values())
    return Counter(map(id, chain(_seen.references, *noted)))


def give_back() -> None:
    """Let the collector have everything again."""
    global _seen
    gc.unfreeze()
    _seen = None


def _before_collection(phase: str, info: dict[str, int]) -> None:
    """A full collection sees everything, as if nothing had been set aside."""
    if phase == "start" and info["generation"] == 2:
        if _seen is not None:
            give_back()
        # What a signal's handler raises in here is lost, so this is there only while it is needed. Of a list
        # that Python is going through, only the last one can be removed.
        if gc.callbacks[-1] is _before_collection:
            gc.callbacks.pop()
