"""A rank's part in a handover: it leaves its device to somebody who waits, or waits for one (docs/duplex.md).

A parked rank that expects a device opens a listener in its store and listens to orders all the same: a
Resume, a Forget or a signal ends its waiting at any moment until the device is its own. Where a device gains
from copying both ways at once, it comes while the other is still leaving; elsewhere when the other has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

from gpuslice.agent.orders import Orders
from gpuslice.checkpoint.switch.swap_endpoints import Successor, SuccessorEnd, SwapListener
from gpuslice.checkpoint.switch.swap_protocol import Terms
from gpuslice.errors import HandoverError
from gpuslice.runtime.runtime import Runtime
from gpuslice.wire import Dismiss, Expect, FromAgent, Resume


class HandedDevice(NamedTuple):
    """What a rank does that was handed a device.

    Attributes
    ----------
    order
        The lease, as if it had been sent.
    successor
        The connection to the one that is still leaving; ``None``: it has left.
    """

    order: Resume
    successor: SuccessorEnd | None


class Handovers:
    """Meets the other job.

    Parameters
    ----------
    send
        Takes what is to be reported.
    """

    def __init__(
        self, runtime: Runtime, orders: Orders, send: Callable[[Sequence[FromAgent]], object]
    ) -> None:
        self._runtime = runtime
        self._orders = orders
        self._send = send
        self._job = runtime.settings.job

    def successor(self) -> Successor | None:
        """Who may wait for this rank's device now that it leaves it."""
        successor, device = self._orders.successor, self._runtime.device
        if successor is None:
            return None
        leased = str(self._runtime.in_use.gpus.outside(device.name))
        terms = Terms(predecessor=self._job, successor=successor.job, epoch=successor.epoch, device=leased)
        directory = self._runtime.ramdisk.home(successor.job, 0)  # whoever expects a device has one rank
        return Successor(directory, terms, overlapped=device.duplex)

    def await_order(self) -> Resume | Dismiss | HandedDevice | None:
        """Wait for a lease, the end or a device; ``None`` if a signal asks the script to end."""
        while True:
            expected = self._orders.expected
            if expected is None:
                self._orders.wait(None)
            elif (coming := self._await_predecessor(expected)) is not None:
                return coming
            if self._orders.called:
                return self._orders.await_order()

    def _await_predecessor(self, expected: Expect) -> HandedDevice | None:
        """Wait at the listener until somebody has come through; ``None`` if something else comes first."""
        terms = Terms(
            predecessor=expected.predecessor,
            successor=self._job,
            epoch=expected.epoch,
            device=expected.device,
        )
        try:
            with closing(SwapListener(self._runtime.store.directory, terms)) as listener:
                while self._orders.wait(expected, listener.fileno()):
                    if (successor := listener.await_predecessor(0.0)) is not None:
                        return self._meet(expected, successor)
        except HandoverError as error:
            self._send(self._orders.decline(error.message))
        return None

    def _meet(self, expected: Expect, successor: SuccessorEnd) -> HandedDevice | None:
        order = Resume(epoch=expected.epoch, device=expected.device)
        device = self._runtime.device
        held = str(self._runtime.in_use.gpus.outside(device.name))
        if device.duplex and held == expected.device and successor.offered_bytes:
            if self._orders.come(expected):
                return HandedDevice(order, successor)
            successor.back()
            successor.close()
            return None
        with closing(successor):
            successor.answer("it comes when everything is published")
            while not successor.vacated and self._orders.wait(expected, *successor.filenos()):
                successor.take_in()
            if not successor.vacated:
                successor.back()
            elif self._orders.come(expected):
                return HandedDevice(order, None)
        return None
