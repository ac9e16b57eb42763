"""Devices that are fit, for jobs that a plan puts where they cannot be.

Their command cannot be started on the node, the node has no room for their state, or the device is closed to
them. Policies that look at ``Job.within`` and ``Job.closed`` make no such plan, unless a job needs several of
the nodes that are fit.
"""

from __future__ import annotations

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.lifecycle.state import State

from .moves import Moves
from .planned_devices import PlannedDevices


def is_limited(job: Gang) -> bool:
    """Return True if some node is not fit for ``job``, or some device is closed to it."""
    return bool(job.command.not_for or job.closed or job.relocation.no_room)


class UnfitPlaces:
    """The jobs whose command some nodes cannot start, or to which some devices are closed.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    plan
        The plan to change: which job has which devices.
    moves
        What exchanges devices between jobs.
    """

    def __init__(self, state: State, plan: PlannedDevices, moves: Moves) -> None:
        self._state, self._plan, self._moves = state, plan, moves
        self._jobs: dict[str, Gang] = {}

    def add(self, job: Gang) -> None:
        """Add ``job``, for which some node is not fit, or to which some device is closed."""
        self._jobs[job.id] = job

    def leave(self, now: float) -> None:
        """Give each job devices that are fit for it, by an exchange; none if that is impossible."""
        for job in list(self._jobs.values()):
            if job.state.ended or not is_limited(job):
                del self._jobs[job.id]
            elif job.running and self._must_leave(job):
                if wish := self._elsewhere(job):
                    self._moves.carry_out(job, wish, now)
                else:
                    self._plan.unassign(job, now)
                    self._plan.start_again()

    def _must_leave(self, job: Gang) -> bool:
        """Return True if the devices that ``job`` has by the plan are not fit. Its present node always is."""
        crowded = job.relocation.no_room and not job.requested_devices  # a request was admitted
        may_be_unfit = not job.lease or bool(crowded)
        unfit_node = may_be_unfit and self._is_unfit(job, job.placement)
        return unfit_node or not job.may_have(job.placement)

    def _is_unfit(self, job: Gang, devices: tuple[int, ...]) -> bool:
        on_unfit_node = not set(self._state.nodes.fitting(job)).issuperset(self._state.nodes.of(devices))
        return on_unfit_node or not job.may_have(devices)

    def _elsewhere(self, job: Gang) -> tuple[int, ...]:
        """Return as many devices as ``job`` has by the plan, on nodes that are fit; empty if too few."""
        nodes = self._state.nodes
        found = [device for device in job.placement if not self._is_unfit(job, (device,))]
        left = [device for device in job.placement if device not in found]
        usable = [
            device
            for node in nodes.fitting(job)
            for device in nodes.cluster.on(node)
            if device not in found and job.may_have((device,))
        ]
        for device in sorted(usable, key=lambda device: len(self._state.holders(device))):
            if left and self._gives(device, left[-1]):
                found.append(device)
                left.pop()
        fits = not left and job.may_be_on(set(nodes.of(found)))
        return tuple(found) if fits else ()

    def _gives(self, device: int, other: int) -> bool:
        """Return True if ``device`` is free, or its only holder can have ``other`` instead."""
        holders = self._state.holders(device)
        if not holders:
            return True
        (holder, *more) = holders
        exchanged = tuple(other if one == device else one for one in holder.placement)
        return (
            not more
            and can_be_exchanged(holder)
            and holder.may_be_on(set(self._state.nodes.of(exchanged)))
            and not self._is_unfit(holder, exchanged)
        )


def can_be_exchanged(job: Gang) -> bool:
    """Return True if ``job`` can be given other devices because another job needs its present ones."""
    return not job.bound and not job.lent and not job.relocation.insisted
