"""Who has which state: the snapshots of each rank on each node, and how they are brought elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .ground import Ground

#: Boundaries by job, rank and node.
Kept = dict[tuple[str, int, str], list[int]]
#: The size of each.
STATE_BYTES = 8
#: A rank keeps so many snapshots on a node.
_KEPT = 2


class States:
    """The snapshots that there are: boundaries by job, rank and node, newest last."""

    def __init__(self) -> None:
        self._kept: Kept = {}

    def publish(self, job: str, rank: int, node: str, boundary: int) -> None:
        """A rank has a new snapshot; those of later boundaries are of an attempt that nobody goes on from."""
        kept = self._kept.get((job, rank, node), [])
        self._kept[job, rank, node] = [*(old for old in kept if old < boundary), boundary][-_KEPT:]

    def lose(self, node: str) -> None:
        """All that lies on ``node`` is gone."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[2] != node}

    def of(self, job: str) -> Kept:
        """Return all snapshots of ``job``."""
        return {key: kept for key, kept in self._kept.items() if key[0] == job}

    def forget(self, job: str) -> None:
        """Remove all snapshots of ``job``."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] != job}

    def bytes_on(self, node: str) -> int:
        """Return the bytes of all snapshots on ``node``."""
        return STATE_BYTES * sum(len(kept) for (_, _, where), kept in self._kept.items() if where == node)

    def put(self, snapshots: Kept) -> None:
        """Put ``snapshots`` back."""
        self._kept.update(snapshots)

    def copy(self, job: str, rank: int, source: str, target: str) -> None:
        """Bring the newest snapshot of a rank to another node."""
        if kept := self._kept.get((job, rank, source)):
            self.publish(job, rank, target, kept[-1])

    def any(self, job: str, ranks: int) -> bool:
        """Return True if there is some snapshot of each rank of ``job`` anywhere."""
        held = {rank for (name, rank, _), kept in self._kept.items() if name == job and kept}
        return held.issuperset(range(ranks))

    def common(self, job: str, nodes: Mapping[int, str]) -> int:
        """Return the newest boundary of which each of these ranks has a snapshot on its node; 0: none."""
        kept = [set(self._kept.get((job, rank, node), ())) for rank, node in nodes.items()]
        return max(set.intersection(*kept), default=0) if kept else 0


class _Wish(NamedTuple):
    job: str
    sources: Sequence[str]
    targets: Sequence[str]
    done: Callable[[str], object]
    waiting: Callable[[str], object] | None
    gone: Callable[[str], object] | None


class Transfers:
    """States on their way, of each job one at a time: the part of ``nodes.transfers`` that is called.

    Parameters
    ----------
    ground
        The world.
    is_down
        Returns True if a node cannot be reached.
    counts
        How many there were of each job; outlives this scheduler.
    """

    def __init__(self, ground: Ground, is_down: Callable[[str], bool], counts: dict[str, int]) -> None:
        self._ground, self._is_down, self._counts = ground, is_down, counts
        self._active: dict[str, _Wish] = {}
        self._queued: list[_Wish] = []
        self._closed = False

    def begin(
        self,
        job: str,
        sources: Sequence[str],
        targets: Sequence[str],
        done: Callable[[str], object],
        waiting: Callable[[str], object] | None = None,
        gone: Callable[[str], object] | None = None,
    ) -> None:
        """Bring the state of each rank of ``job`` to its node, after an earlier wish."""
        if self._closed:
            return
        self._queued.append(_Wish(job, sources, targets, done, waiting, gone))
        self._begin_queued()

    def cancel(self, job: str) -> None:
        """Bring the state of ``job`` nowhere; who asked is told."""
        if (wish := self._active.get(job)) is not None:
            self._active[job] = wish._replace(waiting=None)
            self._ground.loop.after(0.02, lambda: self._end(job, "it was given up"))
        given_up = [wish for wish in self._queued if wish.job == job]
        self._queued = [wish for wish in self._queued if wish.job != job]
        for wish in given_up:
            wish.done("it was given up")

    def close(self) -> None:
        """Nobody is told of anything any more."""
        self._closed = True

    def _begin_queued(self) -> None:
        for wish in list(self._queued):
            if wish in self._queued and wish.job not in self._active:
                self._queued.remove(wish)
                self._active[wish.job] = wish
                self._try(wish)

    def _try(self, wish: _Wish) -> None:
        number = self._counts[wish.job] = self._counts.get(wish.job, 0) + 1
        lasts_s = self._ground.lasts_s(0.5, wish.job, "transfer", number)
        self._ground.loop.after(lasts_s, lambda: self._arrive(wish, number))

    def _arrive(self, wish: _Wish, number: int) -> None:
        if self._closed or self._active.get(wish.job) is not wish:
            return
        sends = self._ground.scenario.profile.sends
        if not sends or any(map(self._is_down, (*wish.sources, *wish.targets))):
            if wish.waiting is None:
                self._end(wish.job, "a node cannot be reached")
                return
            wish.waiting("a node cannot be reached")
            if self._active.get(wish.job) is wish:
                self._try(wish)
            return
        if not self._ground.rooms.takes(tuple(wish.sources), tuple(wish.targets)):
            self._ground.record.note(wish.job, number, "found no room", (wish.sources, wish.targets))
            self._end(wish.job, "No space left on device")
            return
        if self._ground.fault(0.05, wish.job, "transfer fails", number):
            self._ground.record.faults.add((wish.job, "not brought"))
            self._end(wish.job, "No space left on device")
            return
        if wish.gone is not None and not self._ground.states.any(wish.job, len(wish.sources)):
            del self._active[wish.job]
            wish.gone("no living node has a whole snapshot")
            self._begin_queued()
            return
        for rank, (source, target) in enumerate(zip(wish.sources, wish.targets, strict=True)):
            self._ground.states.copy(wish.job, rank, source, target)
        self._end(wish.job, "")

    def _end(self, job: str, error: str) -> None:
        wish = None if self._closed else self._active.pop(job, None)
        if wish is not None:
            wish.done(error)
            self._begin_queued()
