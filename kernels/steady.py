"""Memory that suspends find unchanged: the next one need not read it to know that it still is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .sums import BYTES, INDEX, PADDED, SOURCE, TARGET, Expected, Sums
from .writes import WriteWatch

_Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Chunks by where they begin, in an arena or in memory, ascending; with bytes, padded bytes, checksum."""

    place: _Numbers
    nbytes: _Numbers
    padded: _Numbers
    sums: _Numbers

    @classmethod
    def of(cls, place: _Numbers, chunks: _Numbers, sums: _Numbers) -> _Chunks:
        return cls(place, chunks[:, BYTES], chunks[:, PADDED], sums)._picked(np.argsort(place))

    def find(self, place: _Numbers, nbytes: _Numbers, padded: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Which of other chunks are among these, and where."""
        if not len(self.place):
            return np.zeros(0, np.intp), np.zeros(0, np.intp)
        at = np.minimum(np.searchsorted(self.place, place), len(self.place) - 1)
        same = (self.place[at] == place) & (self.nbytes[at] == nbytes) & (self.padded[at] == padded)
        found = np.flatnonzero(same)
        return found, at[found]

    def those_in(self, others: _Chunks) -> _Chunks:
        """Those that are among others, with the same checksum."""
        found, at = others.find(self.place, self.nbytes, self.padded)
        return self._picked(found[self.sums[found] == others.sums[at]])

    def _picked(self, which: _Numbers) -> _Chunks:
        return _Chunks(self.place[which], self.nbytes[which], self.padded[which], self.sums[which])


class SteadyMemory:
    """Chunks that were the same at two suspends, while others changed, are watched from the resume on.

    What nobody has written to since its bytes were compared with a checksum still has that checksum. Only
    what is likely to stay is watched: a first write to watched memory costs a page fault for each page.
    """

    def __init__(self) -> None:
        self._watch = WriteWatch()
        #: By their place in the arena: unchanged at the last suspend, and also at the one before it.
        self._once: _Chunks | None = None
        self._twice: _Chunks | None = None
        #: By their addresses: what is watched.
        self._watched: list[_Chunks] = []
        #: By their numbers: whose checksum was foreseen.
        self._unread = np.zeros(0, bool)

    def foresee(self, chunks: _Numbers, sums: Sums) -> None:
        """Before a copy out: note the checksums that are known without reading."""
        self._unread = np.zeros(len(sums.now), bool)
        for watched in self._watched:
            found, at = watched.find(chunks[:, SOURCE], chunks[:, BYTES], chunks[:, PADDED])
            clean = self._watch.unwritten(
                chunks[found, SOURCE].astype(np.int64), chunks[found, BYTES].astype(np.int64)
            )
            found, at = found[clean], at[clean]
            sums.now[chunks[found, INDEX]] = watched.sums[at]
            self._unread[chunks[found, INDEX]] = True

    def left(self, chunks: _Numbers, sums: Sums) -> int:
        """After a copy out: remember what had not changed; returns the bytes that nobody had to read."""
        rows = chunks[:, INDEX]
        same = sums.now[rows] == sums.before[rows]
        unread_bytes = int(chunks[same & self._unread[rows], BYTES].sum())
        if same.all():  # nothing was done meanwhile; that says nothing about what comes
            return unread_bytes
        once = _Chunks.of(sums.chunks[rows, 0][same].astype(np.uint64), chunks[same], sums.now[rows][same])
        if self._once is not None:
            self._twice = once.those_in(self._once)
        self._once = once
        return unread_bytes

    def came(self, chunks: _Numbers, expected: Expected) -> None:
        """After a copy in that compared every chunk with its checksum: watch what is likely to stay."""
        if self._twice is None:
            return
        place = expected.chunks[chunks[:, INDEX], 0].astype(np.uint64)
        found, at = self._twice.find(place, chunks[:, BYTES], chunks[:, PADDED])
        right = expected.lows[chunks[found, INDEX]] == self._twice.sums["low"][at]
        found, at = found[right], at[right]
        if len(found):
            address, nbytes = chunks[found, TARGET], chunks[found, BYTES]
            self._watch.watch(address.astype(np.int64), nbytes.astype(np.int64))
            self._watched.append(_Chunks.of(address, chunks[found], self._twice.sums[at]))

    def forget(self) -> None:
        """Before the memory is given back: addresses mean nothing any more."""
        self._watch.forget()
        self._watched.clear()
