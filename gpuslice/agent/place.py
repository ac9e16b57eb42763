"""The place of a rank, which one of several processes of a job has, and how a process asks for it.

A job can have more processes than ranks: a driver imports torch, and its children train. A child asks for
the place at its first boundary after a step. A process loses the place if another process trains, or if it
has nothing on its device for too long. It asks again before it trains or begins CUDA.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from gpuslice.agent.orders import Orders
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.wire import FromAgent, Resume, Withdraw

#: Time within which a lease comes if the place is free.
AT_ONCE_S = 0.5


class Place:
    """The place of this process among its job's ranks: held, waited for or lost.

    Parameters
    ----------
    orders, boundaries
        The process's orders and its boundary counter.
    ask
        Sends Hello.
    enter
        Called in the main thread with a lease under which the script goes on without a restore.

    Attributes
    ----------
    device
        The device of its lease or, if it has none yet, of the lease of the process that started it.
    """

    def __init__(
        self,
        orders: Orders,
        boundaries: BoundaryCounter,
        *,
        ask: Callable[[], None],
        enter: Callable[[Resume], None],
    ) -> None:
        self._orders = orders
        self._boundaries = boundaries
        self._ask = ask
        self._enter = enter
        self._asked = self._in_line = False
        self._watches_cuda = False
        self.device = ""

    def ask_as_child(self) -> None:
        """Make `pass_boundary` wait until this process, which trains, has the place of its parent."""
        self._asked = True
        self._orders.take_leave()

    def stand_in_line(self) -> None:
        """Note that another process has the place, so that `pass_boundary` waits. Runs in the I/O thread."""
        self._in_line = True

    def lose(self) -> None:
        """Note that another process has got the place. Runs in the I/O thread."""
        self._orders.displace()
        self._watch_cuda()

    def withdraw(self, order: Withdraw) -> Sequence[FromAgent]:
        """Give the place up if nothing is on the device. Return Withdrawn if so. Runs in the I/O thread."""
        self._watch_cuda()
        return self._orders.withdraw(order, holds_nothing)

    def pass_boundary(self) -> bool:
        """Ask for the place if it is time to. Return True if the script may run on to the next boundary."""
        if self._orders.displaced:
            if not self._boundaries.trained:
                return True
            self._orders.displaced = False
            self._asked = True
            self._ask()
        asked, self._asked = self._asked, False
        if not asked:
            return False
        while self._orders.quiet_for(AT_ONCE_S):
            if not self._in_line:
                return False
            # It cannot be suspended meanwhile: the snapshot store is the other process's.
        self._in_line = False
        order = self._orders.lease_on(self.device)
        if order is not None:
            self._enter(order)
        return order is not None or self._orders.released

    def _watch_cuda(self) -> None:
        """Wrap torch's start of CUDA, so that a process without the place first waits for a lease."""
        begin: Callable[[], None] | None = getattr(torch._C, "_cuda_init", None)
        if begin is None or self._watches_cuda:
            return

        def _cuda_init() -> None:
            if self._orders.displaced:
                self._orders.displaced = False
                self._ask()
                order = self._orders.await_order()
                if isinstance(order, Resume):
                    self._orders.run_on()
                    self._enter(order)
            begin()

        self._watches_cuda = True
        torch._C._cuda_init = _cuda_init


def holds_nothing() -> bool:
    """Return True if the script has neither begun CUDA nor holds a tensor."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return not any(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
