"""The ledger of the policy's plan, and what the policy is to hear when it is changed without the policy."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.jobs.wait_reasons import Waits
from gpuslice.sched_core.lifecycle.state import State
from gpuslice.sched_core.policy import Plan, View


class PlannedDevices:
    """The devices that jobs are to have by the plan.

    Parameters
    ----------
    state
        The facts that all parts of the core share. Its ledger is changed here alone.
    view
        What the policy is shown.
    waits
        The stopwatches of jobs that wait.
    """

    def __init__(self, state: State, view: View, waits: Waits) -> None:
        self._state, self._view, self._waits = state, view, waits

    def assign(
        self, job: Gang, devices: Sequence[int], now: float, *, shared: bool, as_named: bool = False
    ) -> None:
        """Enter ``devices`` in the ledger for ``job``, which has none; nodes in order, or ``as_named``."""
        devices = self._state.nodes.in_order(devices, as_named=as_named)
        self._state.ledger.grant(job, devices, shared=shared, plan=Plan())
        self._waits.end(job, now)
        job.assign(tuple(devices))
        # It makes progress once all its ranks are on the device (job_steps.settle), unless they still are,
        # and it trains (job_steps.begin).
        stays = job.state is JobState.RUNNING and job.lease == job.placement
        job.progress_from(job.counts_from(now) if stays else inf)
        self._state.reconcile_later(job)

    def unassign(self, job: Gang, now: float) -> None:
        """Take from ``job`` its devices in the ledger. It waits for others from now on."""
        self._state.ledger.release(job)
        job.unassign(now)
        self.wait(job, now)
        self._state.reconcile_later(job)

    def wait(self, job: Gang, now: float, *, quota: bool = False) -> None:
        """Start to measure why ``job`` waits, if it has left its devices."""
        if not job.lease:
            self._waits.begin(job, now, quota=quota)

    def keep_lease(self, job: Gang, now: float) -> None:
        """Assign to ``job`` the devices that it really holds; jobs that were to follow it wait again.

        A job that holds a device that is closed to it has to leave.
        """
        if job.running:
            self.unassign(job, now)
        if not job.may_have(job.lease):
            self.plan_anew()
            return
        for device in job.lease:
            for other in self._state.holders(device):
                if device not in other.lease:
                    self.unassign(other, now)
        shared = any(self._state.ledger.holders(device) for device in job.lease)
        self.assign(job, job.lease, now, shared=shared)
        self.plan_anew()

    def start_again(self) -> None:
        """Have the policy start again from the whole picture: the world is not as it planned."""
        self._view.changes = self._view.changes.outdated()

    def plan_anew(self) -> None:
        """Have the policy start again from the whole picture, and ask it now."""
        self.start_again()
        self._state.plan_due = True
