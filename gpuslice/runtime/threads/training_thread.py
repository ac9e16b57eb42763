"""Finds the thread whose mini-batches are the job's boundaries: the main one, unless another one trains.

A thread that steps an optimizer or runs a backward pass trains. A thread that only fetches batches may do so
for another one (a prefetcher), or may be about to train. Its fetches count while no thread has trained.
"""

from __future__ import annotations

import os
import threading
from _thread import get_ident


class TrainingThread:
    """The thread whose boundaries count. A check costs the thread that trains one comparison.

    Attributes
    ----------
    ident
        Ident of that thread.
    shared
        True if several threads train, by turns or at once. A boundary of one is then none of the others.
    """

    __slots__ = ("_busy", "_rival", "_seen", "_thread", "_trains", "ident", "shared")

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._thread = threading.main_thread()
        self.ident = get_ident() if self._thread.ident is None else self._thread.ident
        self._trains = self._busy = self.shared = False
        self._rival = 0
        #: Threads that have trained while another one was the job's.
        self._seen: set[int] = set()

    @property
    def thread(self) -> threading.Thread:
        """The thread whose boundaries count."""
        return self._thread

    def trains(self) -> bool:
        """Note that the calling thread has trained. Return True if its boundaries count."""
        ident = get_ident()
        if ident == self.ident:
            self._trains, self._rival = True, 0
            return True
        if self._trains and self._thread.is_alive() and self._rival != ident:
            self.shared = self.shared or ident in self._seen
            self._seen.add(ident)
            self._rival = ident
            return False
        self._take(ident)
        self._trains = True
        return True

    def may_train(self) -> bool:
        """Note that the calling thread fetches or calls a module. Return True if its boundaries count."""
        ident = get_ident()
        if ident == self.ident:
            self._busy = True
            return True
        if (self._trains or self._busy) and self._thread.is_alive():
            return False
        self._take(ident)
        self._busy = True
        return True

    def _take(self, ident: int) -> None:
        """Make the calling thread the one whose boundaries count."""
        if self._trains and self._thread.is_alive():
            self._seen.add(self.ident)
        self._thread, self.ident = threading.current_thread(), ident
        self._trains = self._busy = False
        self._rival = 0
