"""What is possible: which devices are closed to each job, and which jobs can be nowhere now.

Devices that no job may have (paused, or used by others) are no part of the cluster that policies see. What is
closed to a job is in ``Job.closed``. A job that can be on closed devices only is withdrawn from the policy
until one opens. A job that is on a device when the device is closed to it stops at its next boundary.
"""

from __future__ import annotations

from collections import Counter

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.lifecycle.state import State

from .moves import Moves
from .planned_devices import PlannedDevices
from .trials import Trials


class OpenDevices:
    """The part that keeps jobs off the devices that are closed to them.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    planned, moves, trials
        What jobs are to have: by the plan, by their owners' requests, for their trials.
    """

    def __init__(self, state: State, planned: PlannedDevices, moves: Moves, trials: Trials) -> None:
        self._state, self._planned, self._moves, self._trials = state, planned, moves, trials

    def look_at(self, job: Gang) -> None:
        """Note which devices are closed to ``job`` now, and whether it can be nowhere."""
        if job.state.ended or not (self._state.closed.any or job.closed):
            return
        closed = self._state.closed.closed_to(job)
        shut_out = bool(closed) and self._is_shut_out(job, closed)
        if (closed, shut_out) == (job.closed, job.shut_out):
            return
        if closed != job.closed and job.shown:
            self._planned.plan_anew()
        job.keep_off(closed, shut_out=shut_out)
        self._state.reconcile_later(job)

    def change(self, now: float) -> None:
        """Take from all jobs what is closed to them by now. The devices of the plan are to be used later."""
        self._state.nodes.pause(self._state.closed.shut)
        for job in [job for job in self._state.jobs.values() if not job.state.ended]:
            self.look_at(job)
            if job.closed:
                self._keep_off(job, now)

    def could_not_run_without(self, devices: frozenset[int], left: int) -> Gang | None:
        """Return a job that could not run if ``devices`` went and so many were ``left``; None: all could."""
        jobs = [job for job in self._state.jobs.values() if not job.state.ended]
        return next((job for job in jobs if job.least > left or _is_bound(job, devices)), None)

    def _keep_off(self, job: Gang, now: float) -> None:
        """Take from ``job`` whatever it has to do with devices that are closed to it."""
        if not job.may_have(job.requested_devices):
            self._moves.forget(job)
            job.history.append((now, "not to be moved: a device is closed"))
        if job.processes.cut_off or job.shut_out:
            return  # it is withdrawn from the policy
        if not job.may_have(job.borrowed):
            self._trials.leave(job, now)
            self._trials.enter(job)
        if job.running and not job.may_have(job.placement):
            self._planned.unassign(job, now)

    def _is_shut_out(self, job: Gang, closed: frozenset[int]) -> bool:
        """Return True if ``job`` needs one of the ``closed`` devices, whatever else is free."""
        nodes = self._state.nodes
        if _is_bound(job, closed):
            return True
        left = Counter(
            nodes.whole.node_of[device]
            for node in nodes.fitting(job)
            for device in nodes.whole.on(node)
            if device not in closed
        )
        if job.within:
            return max((left[node] for node in job.within), default=0) < job.least
        if job.width and not job.lease and not nodes.can_leave(job):
            needed = Counter(job.nodes[: job.least])
            return any(left[node] < count for node, count in needed.items())
        return left.total() < job.least


def _is_bound(job: Gang, devices: frozenset[int]) -> bool:
    """Return True if ``job`` can go on only on one of ``devices``."""
    # A trial that was broken off goes on where it was.
    return (job.bound or bool(job.width and not job.tried)) and not devices.isdisjoint(job.lease or job.home)
