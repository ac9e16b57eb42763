"""Devices that change hands without the scheduler in between: what is promised, and what becomes of it.

When a job is told to leave its device for another that is parked, both hear of each other, and the device
goes from process to process (docs/duplex.md). The core learns of it afterwards, in any order. So the heir has
a *promise*: no lease, but the epoch of its next one. It ends in one of three ways.

- The giver is off the device, or its processes are gone: the heir is given its lease, whatever the policy
  wants by then, because it may be there already. What it said as one who has come was kept until now.
- The heir has declined: it has not come, and will not by this promise. Its epoch is used up.
- The heir's process is gone.

Nothing else ends it. Where it is not wanted any more, the heir is asked to decline; until it has, it is given
nothing else, and the device to nobody else.
"""

from __future__ import annotations

from gpuslice.sched_core.jobs.gang import Gang, Rank, RankPhase
from gpuslice.sched_core.jobs.promise import Promise
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.wire import Bye, Declined, Expect, Forget, FromAgent, Heir, Hello, Progress, Resumed

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
        self._heirs: dict[int, Gang] = {}

    def promised(self, device: int) -> bool:
        """Whether ``device`` is promised to somebody."""
        return device in self._heirs

    def promise(self, giver: Gang, now: float) -> None:
        """Promise the device of ``giver``, which is about to be told to leave it, to whoever follows."""
        if giver.heir or not self._allowed or (heir := self._choose(giver, now)) is None:
            return
        (device,) = giver.lease
        giver.heir = heir.id
        heir.promise = Promise(giver.id, device, heir.epoch + 1)
        self._heirs[device] = heir
        heir.history.append((now, f"device {device} promised after {giver.id}"))
        self.remind(heir)

    def _choose(self, giver: Gang, now: float) -> Gang | None:
        """The one that follows, if it can come by itself: one parked rank, and nobody else concerned.

        Not if something was refused of late: what is to be tried again is done one step after the other.
        """
        if len(giver.ranks) > 1 or giver.refusals or len(self._core.occupants[giver.lease[0]]) > 1:
            return None
        found = [job for job in self._core.holders(giver.lease[0]) if job is not giver]
        if len(found) != 1:
            return None
        (heir,) = found
        parked = heir.state is JobState.SUSPENDED and bool(heir.present(RankPhase.PARKED))
        fits = heir.wanted == giver.lease and heir.promise is None and now >= heir.retry_at_s
        return heir if parked and fits else None

    def named(self, giver: Gang) -> Heir | None:
        """Whom ``giver`` shall hand its device to."""
        if not giver.heir:
            return None
        heir = self._core.jobs[giver.heir]
        promise = _of(heir)
        return None if promise.withdrawn or heir.state.ended else Heir(heir.id, promise.epoch)

    def remind(self, heir: Gang) -> None:
        """Tell ``heir``, if anything is promised to it, what to expect."""
        if (promise := heir.promise) is None:
            return
        order: Expect | Forget = Forget(epoch=promise.epoch)
        if not promise.withdrawn:
            device = str(self._core.devices[promise.device])
            order = Expect(epoch=promise.epoch, device=device, giver=promise.giver)
        self._core.tell(heir, 0, order)

    def withdraw(self, heir: Gang) -> None:
        """Ask ``heir`` to decline."""
        promise = _of(heir)
        if not promise.withdrawn:
            promise.withdrawn = True
            self.remind(heir)

    def hear(self, heir: Gang, rank: Rank, message: FromAgent, now: float) -> None:
        """Keep what ``rank`` says under the promised epoch until its giver is known to have left.

        Raises
        ------
        IllegalTransitionError
            If it cannot have said that; nothing was changed.
        """
        early = _of(heir).early
        come, left = bool(early), bool(early) and isinstance(early[-1], Bye)
        match message:
            case Declined() if not come:
                heir.history.append((now, f"declined: {message.error}"))
                self.void(heir)
                return
            case Resumed() if not come:
                pass
            case Hello(parked=False) if not left:
                pass
            case Progress() | Bye() if come and not left:
                pass
            case _:
                raise heir.illegal(f"{type(message).__name__} of rank {rank.number}, which expects a device")
        if come and isinstance(message, Progress) and isinstance(early[-1], Progress):
            early.pop()
        early.append(message)

    def void(self, heir: Gang) -> None:
        """End the promise of ``heir``, which is not on the device and will not come by it."""
        heir.epoch = self._end(heir).epoch
        if not heir.state.ended:
            self._core.reconcile_later(heir)

    def lost(self, heir: Gang) -> None:
        """The process of ``heir`` is gone: end its promise, if it has one; what it last said still counts."""
        if (promise := heir.promise) is None:
            return
        for message in promise.early:
            if isinstance(message, Progress | Bye):
                heir.ranks[0].boundary, heir.ranks[0].step = message.boundary, message.step
        self.void(heir)

    def fulfil(self, giver: Gang, now: float) -> None:
        """``giver`` is off its device: whoever was promised it has it now."""
        if not giver.heir:
            return
        heir = self._core.jobs[giver.heir]
        promise = self._end(heir)
        if heir.state.ended:  # its process may have come before it could be ended
            heir.epoch = promise.epoch
            self._core.occupy(heir, (promise.device,))
            return
        self._core.grant(heir, (promise.device,), now)
        self._core.reconcile_later(heir)  # the policy may not want it there any more
        for message in promise.early:
            self._core.reports.take(heir, 0, message, now)

    def _end(self, heir: Gang) -> Promise:
        promise, heir.promise = _of(heir), None
        self._core.jobs[promise.giver].heir = ""
        del self._heirs[promise.device]
        return promise


def _of(heir: Gang) -> Promise:
    assert heir.promise is not None
    return heir.promise
