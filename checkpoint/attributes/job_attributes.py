"""Objects reachable from a job's attached ones, over its life: at attach, in each pass, in each snapshot.

A pass over a loader asks its sampler for an order when it begins. So the attributes of the loader's objects
at that time are kept, too: a restarted process begins the pass with them. A loader that is not attached is
recorded from its first pass on, and saved while a pass over it is under way.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import DataLoader

from gpuslice.checkpoint.attributes.changes import Changes
from gpuslice.checkpoint.attributes.known import KnownAttributes
from gpuslice.checkpoint.named.describe import is_stateful
from gpuslice.checkpoint.named.generators import Generator, own_generators
from gpuslice.checkpoint.named.state import LIKE_NAMED, Restoration

#: A snapshot's entries: of attached objects; of a loader when its pass began; of a loader not attached.
ATTRIBUTES, PASS, LOADER = LIKE_NAMED
_ROOT = "loader of the pass"

#: Compares a snapshot's entries with live objects.
Compare = Callable[[Mapping[str, object]], Restoration]


class _Loader:
    """A data loader that ``job.batches`` uses and that is not attached."""

    def __init__(self, loader: object) -> None:
        self._loader = weakref.ref(loader)
        self.known = KnownAttributes({_ROOT: loader}, weak=True)

    @property
    def roots(self) -> dict[str, object]:
        """The loader under its name; empty if the loader is gone."""
        loader = self._loader()
        return {} if loader is None else {_ROOT: loader}


class JobAttributes:
    """The attributes of one job's objects.

    Parameters
    ----------
    attached
        Returns the attached objects by name.

    Attributes
    ----------
    obstacles
        Why, by the attributes, no other process could continue from here; set by `look`.
    """

    def __init__(self, attached: Callable[[], Mapping[str, object]]) -> None:
        self._attached = attached
        self._known = KnownAttributes(attached())
        self._loaders: dict[int, _Loader] = {}
        self._read: list[weakref.ref[Any]] = []
        self._loader: object = None
        self._start: Changes | None = None
        self._iterator = ""
        self._compare: Compare | None = None
        self.obstacles: list[str] = []
        self._told: set[str] = set()
        self._looked: dict[str, object] | None = None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers that are attached or reachable from attached objects."""
        return [item for item in self._known.objects if isinstance(item, torch.optim.Optimizer)]

    def knows(self, item: object) -> bool:
        """Return True if an object is reachable from the attached ones."""
        known = self._known.name_of(item) is not None
        return known or any(item is one for one in _generators(self._attached()))

    def look(self) -> list[str]:
        """Compare all objects with their recorded state. Return why no other process could continue."""
        changes = self._known.changes(self._attached())
        found: dict[str, object] = {ATTRIBUTES: changes}
        obstacles = [*changes.obstacles, *filter(None, [self._iterator])]
        if self._start is not None:
            found[PASS] = self._start
            obstacles += self._start.obstacles
        for loader in self._loaders.values():
            current = loader.roots.get(_ROOT) is self._loader is not None
            of_loader = loader.known.changes(loader.roots)
            obstacles += of_loader.obstacles
            if current:
                found[LOADER] = of_loader
            elif of_loader:
                obstacles.append(f"{of_loader.paths[0]} changes, and that loader is not attached")
        self.obstacles = obstacles
        self._looked = found
        return obstacles

    @property
    def obstacle(self) -> str:
        """The first reason why no other process could continue from here; empty if there is none."""
        return next(iter(self.obstacles), "")

    def overlook(self) -> None:
        """Drop the result of the last `look`, so that the next `state` compares the objects again."""
        self._looked = None

    def news(self) -> str:
        """Return the `obstacle` if it was not returned before; else ""."""
        found = self.obstacle
        if found in self._told:
            return ""
        self._told.add(found)
        return found

    def state(self) -> dict[str, object]:
        """Return the snapshot's entries, from the newest `look` if no code of the script has run since."""
        if self._looked is None:
            self.look()
        found, self._looked = self._looked, None
        assert found is not None
        return {ATTRIBUTES: tuple(self.obstacles)} if self.obstacles else found

    def entries(self) -> dict[str, object]:
        """Return the objects that a restart compares with a snapshot's entries, by the entries' names."""
        return {ATTRIBUTES: self._known}

    def revert(self) -> None:
        """Undo the script's changes of attributes since it attached."""
        self._known.revert(self._attached())

    def head_for(self, compare: Compare) -> None:
        """Restore, at the next pass, the attributes that a snapshot has for the beginning of that pass."""
        self._compare = compare

    def reached(self) -> None:
        """Restore a loader that is not attached to its state in the snapshot."""
        compare, self._compare = self._compare, None
        loader = self._loaders.get(id(self._loader))
        if compare is not None and loader is not None:
            restoration = compare({LOADER: loader.known})  # with what the pass has made
            loader.known.revert(loader.roots)
            restoration.apply()

    def enter(self, loader: object) -> None:
        """Record a loader before the script iterates over it."""
        if self.knows(loader) or is_stateful(loader) or id(loader) in self._loaders:
            return
        if isinstance(loader, Iterator) and not isinstance(loader, DataLoader):
            self._iterator = self._where_it_stands(loader)
            return
        try:
            self._loaders[id(loader)] = _Loader(loader)
        except TypeError:  # a list, which has no weak references and no attributes
            return
        weakref.finalize(loader, self._loaders.pop, id(loader), None).atexit = False

    def _where_it_stands(self, iterator: Iterator[Any]) -> str:
        """Return why a job cannot restart inside this iterator; "" if the iterator has just begun."""
        fresh = not isinstance(iterator, GeneratorType) or (
            inspect.getgeneratorstate(iterator) == inspect.GEN_CREATED
        )
        read = any(one() is iterator for one in self._read)
        try:
            self._read.append(weakref.ref(iterator))
        except TypeError:
            return ""
        what = f"job.batches goes through {type(iterator).__name__!r} again"
        return "" if fresh and not read else f"{what}: where an iterator stands cannot be saved"

    def begin_pass(self, loader: object) -> None:
        """Keep the state of the loader's objects before the sampler is asked for an order."""
        self._loader, self._looked = loader, None
        changes = self._changes_of(loader)
        self._start = changes.frozen() if changes else None

    def restart_pass(self, loader: object) -> None:
        """Restore the loader's objects to their state at the beginning of the pass."""
        name = self._known.name_of(loader)
        other = self._loaders.get(id(loader))
        known = self._known if other is None else other.known
        if other is not None or name is not None:
            known.revert({name or _ROOT: loader})
        if self._compare is not None:
            self._compare({PASS: known}).apply()

    def end_pass(self) -> None:
        """Drop the state that `begin_pass` kept."""
        self._loader = self._start = self._looked = None
        self._iterator = ""

    def _changes_of(self, loader: object) -> Changes | None:
        name = self._known.name_of(loader)
        if name is not None:
            return self._known.changes({name: loader})
        other = self._loaders.get(id(loader))
        return None if other is None else other.known.changes(other.roots)


def _generators(item: object) -> Iterator[Generator]:
    """Yield all generators of attached objects, also those that were made later."""
    if isinstance(item, Generator):
        yield item
    elif isinstance(item, DataLoader):
        yield from own_generators(item)
    elif isinstance(item, (Mapping, list, tuple)):
        for part in item.values() if isinstance(item, Mapping) else item:
            yield from _generators(part)
