"""Moves of jobs against the policy's plan: to where the owner wants a job, or to where its state is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.lifecycle.events import Notice
from gpuslice.sched_core.lifecycle.state import State

from .bound_jobs import home_placement
from .homes import Homes
from .planned_devices import PlannedDevices

#: The number of tries after which the pause between tries is not doubled any more.
_MOST_DOUBLINGS = 16


class _Grant(NamedTuple):
    """A job that was given devices where its processes are not.

    Attributes
    ----------
    moved, asked
        True if it had others before; true if its owner asked for these.
    back
        True if it has processes on its former node again, because its state cannot be on the new one.
    """

    job: Gang
    moved: bool
    asked: bool
    back: bool = False


class Moves:
    """Exchanges of devices between jobs in a plan that has been adopted.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    plan
        The plan to change: which job has which devices.
    homes
        Where the processes and the states of jobs are.
    """

    def __init__(self, state: State, plan: PlannedDevices, homes: Homes) -> None:
        self._state, self._plan, self._homes = state, plan, homes
        #: Jobs that their owners want on other devices (``Gang.requested_devices``), by id.
        self._requested: dict[str, Gang] = {}
        #: For jobs whose move was tried in vain: the boundary of the last try, and the number of tries.
        self._tried: dict[str, tuple[int, int]] = {}
        #: Jobs that were given devices on nodes where their processes are not, by id.
        self._granted: dict[str, _Grant] = {}

    def request(self, job: Gang, devices: tuple[int, ...]) -> None:
        """Remember that the owner of ``job`` wants it on ``devices``; replace an earlier request."""
        self.forget(job)
        job.requested_devices = devices
        job.relocation.refuse("")
        self._requested[job.id] = job

    def forget(self, job: Gang) -> None:
        """Drop the owner's request to move ``job``, if there is one."""
        job.requested_devices = ()
        self._requested.pop(job.id, None)
        self._tried.pop(job.id, None)

    def retry_is_due(self) -> bool:
        """Return True if a request that was tried in vain is to be tried again now."""
        return any(job.id in self._tried and self._is_due(job) for job in self._requested.values())

    def _is_due(self, job: Gang) -> bool:
        """Return True if the owner's request to move ``job`` is to be carried out now.

        After an unsuccessful try the job trains on first. It passes 1, 3, 7, 15 boundaries between two tries,
        and so on.
        """
        if not job.running:
            return False
        boundary, tries = self._tried.get(job.id, (0, 0))
        pause = 2 ** min(tries, _MOST_DOUBLINGS) - 1
        return not tries or (bool(job.lease) and _boundary(job) >= boundary + pause)

    def carry_out_requests(self, now: float) -> None:
        """Carry out the owners' requests that are due: give each job the devices that its owner wants."""
        for job in [job for job in self._requested.values() if self._is_due(job)]:
            del self._requested[job.id]
            wish, job.requested_devices = job.requested_devices, ()
            if not job.may_have(wish):
                continue  # they were closed to it meanwhile
            self.carry_out(job, wish, now)
            self.granted(job, moved=True, asked=True)
            self._homes.redirect(job, now)

    def granted(self, job: Gang, *, moved: bool, asked: bool = False) -> None:
        """Remember for ``settle_on_nodes`` that ``job`` was given devices where its processes are not.

        ``moved`` is True if it had other devices before, ``asked`` if its owner asked for the new ones.
        """
        on_its_way = job.lent or job.relocating
        if job.command.launched and (on_its_way or self._state.nodes.misplaced(job)):
            self._granted[job.id] = _Grant(job, moved, asked)

    def settle_on_nodes(self, now: float) -> None:
        """Give jobs devices on the nodes of their processes instead, if that costs no other job its own."""
        for job, moved, asked, back in list(self._granted.values()):
            if job.state.ended:  # it counts as running until its next attempt
                del self._granted[job.id]
                continue
            if (job.lent and job.running) or job.relocating:
                continue  # it is wanted nowhere while others are tried on its devices, or has no node now
            leaves = self._state.nodes.can_leave(job)
            # Of a command that is started anew it is known while it has a lease.
            cannot = job.spec.relaunch and not leaves
            stays = moved and (leaves or (job.lease and not cannot))
            if not job.running or not self._state.nodes.misplaced(job):
                del self._granted[job.id]
            elif not stays and (wish := self._homes.near_processes(job)):
                del self._granted[job.id]
                if asked:
                    self._come_back(job, now)
                self.carry_out(job, wish, now)
            elif not job.lease or cannot:  # it has parked, so it is known whether it can go on elsewhere
                del self._granted[job.id]
                if not leaves:
                    if asked:
                        self._come_back(job, now)
                    self._plan.unassign(job, now)
                    self._plan.start_again()
                    self._state.plan_due |= back  # others can use what it was given

    def look_at(self, job: Gang) -> None:
        """Remember for ``settle_on_nodes`` whether ``job`` goes back to the node of its state."""
        if job.relocating and job.relocation.stays and job.running and not job.state.ended:
            self._granted[job.id] = _Grant(job, moved=False, asked=False, back=True)

    def _come_back(self, job: Gang, now: float) -> None:
        """Report that ``job`` is not moved as its owner wants; request the move again if it can work later.

        Only its own process can go on from the present snapshot. If other processes will be able to go on
        from a later one, the move is tried again.
        """
        devices = ", ".join(str(self._state.devices[device]) for device in job.placement)
        again = job.portable_later and not job.spec.relaunch
        if again:
            _, tries = self._tried.get(job.id, (0, 0))
            self.request(job, job.placement)
            self._tried[job.id] = _boundary(job), tries + 1
        else:
            self.forget(job)
        if not again:
            job.relocation.refuse(f"not moved to {devices}: only its own process can go on from where it is")
        job.history.append((now, f"not moved to {devices}{' yet' if again else ''}"))
        self._state.order(Notice("not_moved", job.id, {"to": devices, "again": again}))

    def send_home(self, job: Gang, now: float) -> None:
        """Give ``job`` the devices where its state can be restored, in exchange for those that it has.

        If that is impossible, for example because another job's state is bound to them, the job waits.
        """
        others = {other.id: other for device in job.home for other in self._state.holders(device)}
        others.pop(job.id, None)
        home = home_placement(job)
        apart = not job.may_be_on(set(self._state.nodes.of(home)))
        if apart or not job.may_have(home) or any(other.bound for other in others.values()):
            self._plan.unassign(job, now)
            self._plan.start_again()
            return
        self.carry_out(job, home, now)

    def carry_out(self, job: Gang, wish: tuple[int, ...], now: float) -> None:
        """Give ``job`` the devices ``wish`` and give their holders the devices that ``job`` leaves."""
        if wish == job.placement:
            return
        ledger = self._state.ledger
        ours, theirs = set(job.placement), set(wish)
        left, taken = sorted(ours - theirs), sorted(theirs - ours)
        swap = dict(zip([*left, *taken], [*taken, *left], strict=True))
        others = {other.id: other for device in swap for other in self._state.holders(device)}
        others.pop(job.id, None)
        moves = [(job, wish, ledger.shares(job))]
        for other in others.values():
            moves.append((other, self._exchanged(other, swap), ledger.shares(other)))
        for moved, _, _ in moves:
            self._plan.unassign(moved, now)
        for moved, devices, shared in moves:
            if devices:
                self._plan.assign(moved, devices, now, shared=shared, as_named=moved is job)
                self.granted(moved, moved=True)
        self._plan.start_again()

    def _exchanged(self, other: Gang, swap: Mapping[int, int]) -> tuple[int, ...]:
        """Return the devices of ``other`` after the exchange ``swap``; empty if it can have none.

        A job that must be on one node and would be on two, or would have a device that is closed to it, keeps
        the devices that were not exchanged, if they are enough.
        """
        devices = tuple(swap.get(device, device) for device in other.placement)
        if other.may_be_on(set(self._state.nodes.of(devices))) and other.may_have(devices):
            return devices
        left = tuple(device for device in other.placement if device not in swap)
        return left if len(left) >= other.least else ()


def _boundary(job: Gang) -> int:
    """Return the newest boundary that all ranks of ``job`` have passed."""
    return min(rank.boundary for rank in job.members)
