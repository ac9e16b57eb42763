"""Ranks that are stopped while they train in lockstep agree on the boundary."""

from __future__ import annotations

import threading

from gpuslice.agent.orders import Phase
from gpuslice.wire import Overshot, Resume, Suspend

from ...patience import PATIENCE_S
from .rank import Rank

RANKS, ROUNDS = 3, 100


class Gang:
    """Ranks in lockstep (a barrier per mini-batch, as a collective is), and a scheduler that stops them.

    Each rank's ``suspend`` is called from the scheduler's thread, as the I/O thread does.
    """

    def __init__(self) -> None:
        self.ranks = [Rank().running() for _ in range(RANKS)]
        self.collective = threading.Barrier(RANKS)
        self.stopped = threading.Semaphore(0)
        self.stops: list[list[int]] = [[] for _ in range(RANKS)]
        self.over = False

    def train(self, number: int) -> None:
        rank = self.ranks[number]
        rank.boundaries.controller = self._controller(number)
        while not self.over:
            rank.boundaries.fetching()
            self.collective.wait(PATIENCE_S)

    def _controller(self, number: int) -> object:
        gang, rank = self, self.ranks[number]

        class Controller:
            def at_boundary(self, boundary: int) -> tuple[int, ...]:
                if rank.orders.arrive(boundary):
                    gang.stops[number].append(boundary)
                    gang.stopped.release()
                    rank.orders.await_order()
                    rank.orders.run_on()
                return ()

        return Controller()

    def stop_all(self) -> int:
        """What the scheduler does: stop a little ahead; after an Overshot further ahead, until all have."""
        target = max(rank.boundaries.count for rank in self.ranks) + 1
        while any(stops[-1:] != [target] for stops in self.stops):
            for stops, rank in zip(self.stops, self.ranks, strict=True):
                if rank.orders.phase is Phase.PARKED and stops[-1:] != [target]:
                    rank.orders.resume(Resume(epoch=1, device="cpu"))
            if overshot := [answer.boundary for answer in self._order(target)]:
                target = max(overshot) + 2
            else:
                self.stopped.acquire(timeout=0.01)
        return target

    def _order(self, stop_at: int) -> list[Overshot]:
        answers = [rank.orders.suspend(Suspend(epoch=1, stop_at=stop_at)) for rank in self.ranks]
        return [message for answer in answers for message in answer if isinstance(message, Overshot)]


def test_a_gang_in_lockstep_always_agrees_where_to_stop() -> None:
    gang = Gang()
    threads = [threading.Thread(target=gang.train, args=(n,), daemon=True) for n in range(RANKS)]
    for thread in threads:
        thread.start()
    for number in range(ROUNDS):
        boundary = gang.stop_all()
        assert [rank.boundaries.count for rank in gang.ranks] == [boundary] * RANKS
        gang.over = number == ROUNDS - 1
        for rank in gang.ranks:
            rank.orders.resume(Resume(epoch=1, device="cpu"))
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
