"""Devices that change hands without the scheduler in between: what is promised, and what becomes of it.

When a job is told to leave its device for another that is parked, both hear of each other, and the device
goes from process to process (docs/duplex.md). The core learns of it afterwards, in any order. So the
successor has a *promise*: no lease, but the epoch of its next one. It ends in one of three ways.

- The predecessor is off the device, or its processes are gone: the successor is given its lease, whatever the
  policy wants by then, because it may be there already. What it said as one who has come was kept until now.
- The successor has declined: it has not come, and will not by this promise. Its epoch is used up.
- The successor's process is gone.

Nothing else ends it. Where it is not wanted any more, the successor is asked to decline; until it has, it is
given nothing else, and the device to nobody else.
"""

from __future__ import annotations

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.promise import Promise
from gpuslice.sched_core.jobs.rank import Rank, RankPhase
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.wire import (
    Bye,
    Declined,
    Expect,
    Forget,
    FromAgent,
    Hello,
    Profiled,
    Progress,
    Resumed,
    Successor,
)

from .contract import CoreContract


class Handovers:
    """The part of ``Core`` that promises devices.

    Parameters
    ----------
    core
        Whose.
    allowed
        Whether any are promised.
    """

    def __init__(self, core: CoreContract, *, allowed: bool) -> None:
        self._core = core
        self._allowed = allowed
        #: By device.
        self._successors: dict[int, Gang] = {}

    def promised(self, device: int) -> bool:
        """Whether ``device`` is promised to somebody."""
        return device in self._successors

    def promise(self, predecessor: Gang, now: float) -> None:
        """Promise the device of ``predecessor``, which will be told to leave it, to whoever follows."""
        if (
            predecessor.successor
            or not self._allowed
            or (successor := self._choose(predecessor, now)) is None
        ):
            return
        (device,) = predecessor.lease
        predecessor.successor = successor.id
        successor.promise = Promise(predecessor.id, device, successor.epoch + 1)
        self._successors[device] = successor
        successor.history.append((now, f"device {device} promised after {predecessor.id}"))
        self.remind(successor)

    def _choose(self, predecessor: Gang, now: float) -> Gang | None:
        """The one that follows, if it can come by itself: one parked rank, and nobody else concerned.

        Not if something was refused of late: what is to be tried again is done one step after the other.
        """
        if (
            len(predecessor.ranks) > 1
            or predecessor.refusals
            or len(self._core.occupants[predecessor.lease[0]]) > 1
        ):
            return None
        found = [job for job in self._core.holders(predecessor.lease[0]) if job is not predecessor]
        if len(found) != 1:
            return None
        (successor,) = found
        parked = successor.state is JobState.SUSPENDED and bool(successor.present(RankPhase.PARKED))
        fits = (
            len(successor.ranks) == 1
            and successor.wanted == predecessor.lease
            and successor.promise is None
            and not self._core.relocations.misplaced(successor)
            and now >= successor.retry_at_s
        )
        return successor if parked and fits else None

    def named(self, predecessor: Gang) -> Successor | None:
        """Whom ``predecessor`` shall hand its device to."""
        if not predecessor.successor:
            return None
        successor = self._core.jobs[predecessor.successor]
        promise = _of(successor)
        return None if promise.withdrawn or successor.state.ended else Successor(successor.id, promise.epoch)

    def remind(self, successor: Gang) -> None:
        """Tell ``successor``, if anything is promised to it, what to expect."""
        if (promise := successor.promise) is None:
            return
        order: Expect | Forget = Forget(epoch=promise.epoch)
        if not promise.withdrawn:
            device = str(self._core.devices[promise.device].on(""))
            order = Expect(epoch=promise.epoch, device=device, predecessor=promise.predecessor)
        self._core.tell(successor, 0, order)

    def withdraw(self, successor: Gang) -> None:
        """Ask ``successor`` to decline."""
        promise = _of(successor)
        if not promise.withdrawn:
            promise.withdrawn = True
            self.remind(successor)

    def hear(self, successor: Gang, rank: Rank, message: FromAgent, now: float) -> None:
        """Keep what ``rank`` says under the promised epoch until its predecessor is known to have left.

        Raises
        ------
        IllegalTransitionError
            If it cannot have said that; nothing was changed.
        """
        early = _of(successor).early
        come, left = bool(early), bool(early) and isinstance(early[-1], Bye)
        match message:
            case Declined() if not come:
                successor.history.append((now, f"declined: {message.error}"))
                self.void(successor)
                return
            case Resumed() if not come:
                pass
            case Hello(parked=False) if not left:
                pass
            case Progress() | Profiled() | Bye() if come and not left:
                pass
            case _:
                raise successor.illegal(
                    f"{type(message).__name__} of rank {rank.number}, which expects a device"
                )
        if come and isinstance(message, Progress) and isinstance(early[-1], Progress):
            early.pop()
        early.append(message)

    def void(self, successor: Gang) -> None:
        """End the promise of ``successor``, which is not on the device and will not come by it."""
        successor.epoch = self._end(successor).epoch
        if not successor.state.ended:
            self._core.reconcile_later(successor)

    def lost(self, successor: Gang) -> None:
        """The process of ``successor`` is gone: end its promise, if any; what it last said still counts."""
        if (promise := successor.promise) is None:
            return
        for message in promise.early:
            if isinstance(message, Progress | Bye):
                successor.ranks[0].boundary, successor.ranks[0].step = message.boundary, message.step
        self.void(successor)

    def fulfil(self, predecessor: Gang, now: float) -> None:
        """``predecessor`` is off its device: whoever was promised it has it now."""
        if not predecessor.successor:
            return
        successor = self._core.jobs[predecessor.successor]
        promise = self._end(successor)
        if successor.state.ended:  # its process may have come before it could be ended
            successor.epoch = promise.epoch
            self._core.occupy(successor, (promise.device,))
            return
        self._core.grant(successor, (promise.device,), now)
        self._core.reconcile_later(successor)  # the policy may not want it there any more
        for message in promise.early:
            self._core.reports.take(successor, 0, message, now)

    def _end(self, successor: Gang) -> Promise:
        promise, successor.promise = _of(successor), None
        self._core.jobs[promise.predecessor].successor = ""
        del self._successors[promise.device]
        return promise


def _of(successor: Gang) -> Promise:
    assert successor.promise is not None
    return successor.promise
