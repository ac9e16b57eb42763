"""Where a job is to be, against the policy's plan: where its owner wants it, and where its state is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.ledger import Ledger

from .contract import CoreContract


class PlannedDevices(Protocol):
    """What ``Planning`` lets be done to its plan."""

    @property
    def ledger(self) -> Ledger: ...
    def take(self, job: Gang, now: float) -> None: ...
    def give(self, job: Gang, devices: Sequence[int], now: float, *, shared: bool) -> None: ...
    def start_again(self) -> None: ...


class Moves:
    """Exchanges devices between jobs in a plan that has been adopted.

    Parameters
    ----------
    core
        Whose.
    plan
        The devices as the policy has given them away.
    """

    def __init__(self, core: CoreContract, plan: PlannedDevices) -> None:
        self._core = core
        self._plan = plan
        #: Jobs that were given devices where their processes are not, and whether that was on purpose.
        self._granted: dict[str, tuple[Gang, bool]] = {}

    def granted(self, job: Gang, *, moved: bool) -> None:
        """``job`` has been given devices, or (``moved``) others than it had."""
        if job.launched and self._core.relocations.misplaced(job):
            self._granted[job.id] = job, moved

    def settle_on_nodes(self, now: float) -> None:
        """Let jobs have devices where their processes are, if that costs nobody else any."""
        for job, moved in list(self._granted.values()):
            leaves = self._core.relocations.can_leave(job)
            # Of a command that is started anew it is known while it has a lease.
            cannot = job.spec.relaunch and not leaves
            stays = moved and (leaves or (job.lease and not cannot))
            if not job.running or not self._core.relocations.misplaced(job):
                del self._granted[job.id]
            elif not stays and (wish := self._core.relocations.wish(job)):
                del self._granted[job.id]
                job.requested_devices = wish
                self.carry_out(job, now)
            elif not job.lease or cannot:  # it has parked, so it is known whether it can go on elsewhere
                del self._granted[job.id]
                if not leaves:
                    self._plan.take(job, now)
                    self._plan.start_again()

    def send_home(self, job: Gang, now: float) -> None:
        """Put ``job`` where its state can come back; if another's can come back only there, it waits."""
        others = {other.id: other for device in job.home for other in self._core.holders(device)}
        others.pop(job.id, None)
        apart = not job.may_be_on(set(self._core.relocations.of(job.home_placement)))
        if apart or any(other.bound for other in others.values()):
            self._plan.take(job, now)
            self._plan.start_again()
            return
        job.requested_devices = job.home_placement
        self.carry_out(job, now)

    def carry_out(self, job: Gang, now: float) -> None:
        """Put ``job`` where its owner wants it; whoever is there goes where it comes from."""
        wish, job.requested_devices = job.requested_devices, ()
        if wish == job.placement:
            return
        ledger = self._plan.ledger
        ours, theirs = set(job.placement), set(wish)
        left, taken = sorted(ours - theirs), sorted(theirs - ours)
        swap = dict(zip([*left, *taken], [*taken, *left], strict=True))
        others = {other.id: other for device in swap for other in self._core.holders(device)}
        others.pop(job.id, None)
        moves = [(job, wish, ledger.shares(job))]
        for other in others.values():
            moves.append((other, self._exchanged(other, swap), ledger.shares(other)))
        for moved, _, _ in moves:
            self._plan.take(moved, now)
        for moved, devices, shared in moves:
            if devices:
                self._plan.give(moved, devices, now, shared=shared)
                moved.migrations += bool(moved.lease)
        self._plan.start_again()

    def _exchanged(self, other: Gang, swap: Mapping[int, int]) -> tuple[int, ...]:
        """What ``other`` has after an exchange of devices.

        One that needs one node, and would be on two, keeps what is left to it, if that is enough.
        """
        devices = tuple(swap.get(device, device) for device in other.placement)
        if other.may_be_on(set(self._core.relocations.of(devices))):
            return devices
        left = tuple(device for device in other.placement if device not in swap)
        return left if len(left) >= other.least else ()
