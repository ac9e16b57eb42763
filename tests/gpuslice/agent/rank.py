"""A rank's orders without a job: what it is told, and where it stands."""

from __future__ import annotations

import signal

from gpuslice.agent.orders import Orders
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.wire import Resume, Suspend


class Rank:
    """Orders with a counter."""

    def __init__(self) -> None:
        self.boundaries = BoundaryCounter()
        self.orders = Orders(self.boundaries)

    def running(self, *, epoch: int = 1, boundary: int = 0) -> Rank:
        self.orders.resume(Resume(epoch=epoch, device="cpu"))
        assert isinstance(self.orders.await_order(), Resume)
        self.orders.run_on()
        self.boundaries.count = boundary
        return self

    def parked(self, *, epoch: int = 1, boundary: int) -> Rank:
        self.running(epoch=epoch, boundary=boundary - 1)
        assert self.orders.suspend(Suspend(epoch=epoch, stop_at=boundary)) == []
        self.boundaries.count = boundary
        assert self.orders.arrive(boundary)
        return self


def on_leave(rank: Rank, boundary: int) -> None:
    """Take leave of being parked at ``boundary``, as a script does that is asked to end."""
    rank.parked(boundary=boundary)
    rank.orders.interrupt(signal.SIGTERM)
    assert rank.orders.await_order() is None
    rank.orders.take_leave()
