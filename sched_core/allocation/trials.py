"""Trials: a job's first few mini-batches at once, ahead of every queue, so that a broken job fails early.

The Philly study (Jeon et al., ATC 2019, section 6) would run every job on a small pool first. A node has no
devices for that, and a gang has as many ranks as it has, so a trial borrows devices. Their holders are
suspended for it and come back afterwards. The policy sees nothing of that: in its ledger the holders run on,
and the job arrives when its trial is over.
"""

from __future__ import annotations

from itertools import chain
from math import inf

from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import IN_TRANSIT, JobState
from gpuslice.sched_core.lifecycle import timeouts
from gpuslice.sched_core.lifecycle.events import Notice
from gpuslice.sched_core.lifecycle.state import News, State


class Trials:
    """The jobs that are being tried or wait for their trial, and the jobs that lend devices for trials.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        #: Jobs that wait for a trial, in order of arrival, jobs on trial, and jobs that lend; by id.
        self._waiting: dict[str, Gang] = {}
        self._trying: dict[str, Gang] = {}
        self._lenders: dict[str, Gang] = {}
        #: A job that has just not left its devices, while others are chosen.
        self._avoided: Gang | None = None

    def enter(self, job: Gang) -> None:
        """Let ``job``, which is ready, wait for its trial.

        Nothing happens if its trial is under way: its processes were then started anew for the trial.
        """
        if job.id not in self._trying:
            self._waiting[job.id] = job

    def leave(self, job: Gang, now: float) -> None:
        """End the trial of ``job`` or its waiting for one, if any; give back the devices that it borrowed."""
        self._waiting.pop(job.id, None)
        if self._trying.pop(job.id, None) is not None:
            job.give_back(now)
            self._changed(job)

    def waits(self, job: Gang) -> bool:
        """Return True if ``job`` waits for devices to be tried on."""
        return job.id in self._waiting

    @property
    def tried(self) -> list[Gang]:
        """The jobs that have borrowed devices for their trial."""
        return list(self._trying.values())

    def avoid(self, late: Gang, now: float) -> None:
        """Send trials elsewhere that wait for devices of ``late``, a job that does not leave its devices."""
        for job in [job for job in self._trying.values() if not job.lease]:
            if not set(job.borrowed).isdisjoint(late.lease):
                self.leave(job, now)
                self.enter(job)
        self._avoided = late
        self.update(now)
        self._avoided = None

    def look_at(self, job: Gang, now: float) -> None:
        """End the trial of ``job`` if the job has made enough mini-batches.

        Let a job wait for another trial if its state cannot be brought to the node of the devices.
        """
        if job.borrowed and not job.lease and job.relocation.stays and self._state.misplaced(job):
            self.leave(job, now)
            self.enter(job)
        passed = min((rank.boundary for rank in job.training()), default=0) if job.borrowed else 0
        if passed > job.spec.trial_batches:
            self._pass(job, now, Notice("trial_passed", job.id, {"batches": job.spec.trial_batches}))

    def update(self, now: float) -> None:
        """Begin the trials that have devices, end those that take too long, and choose the jobs that lend."""
        for job in [job for job in self._trying.values() if self._ends_s(job) <= now]:
            self._pass(job, now, timeouts.notice(job, "trial", now, kill=False))
        for job in list(self._waiting.values()):
            devices = self._choose(job)
            if devices:
                del self._waiting[job.id]
                self._trying[job.id] = job
                job.borrow(devices)
                job.history.append((now, "trial"))
                self._state.reconcile_later(job)
        if self._trying or self._lenders:
            self._lend(now)

    def due_s(self) -> float:
        """Return when the next trial will have taken too long; infinite if none will."""
        return min(map(self._ends_s, self._trying.values()), default=inf)

    def _ends_s(self, job: Gang) -> float:
        limit_s = job.spec.boundary_timeout_s
        return job.lateness.told_s + limit_s if limit_s and job.state is JobState.RUNNING else inf

    def _pass(self, job: Gang, now: float, notice: Notice) -> None:
        job.tried = True
        self.leave(job, now)
        self._state.order(notice)
        self._state.touch(job)

    def _choose(self, job: Gang) -> tuple[int, ...]:
        """Return the devices to borrow for ``job``, where least is disturbed; empty if there are too few."""
        taken = {device for other in self._trying.values() for device in other.borrowed} | job.closed
        if job.width:  # its trial was broken off, and where else it could go on is not known
            present = job.lease or job.home
            return present if taken.isdisjoint(present) else ()
        free = FreeDevices.besides(self._state.nodes.cluster, taken)
        if job.relocation.stays and job.state_nodes:
            return self._at_home(job, free)
        fitting = self._state.nodes.fitting(job)
        nodes = [list(free.on_node[node]) for node in fitting]
        groups = nodes if job.within else [list(chain.from_iterable(nodes))]
        # The other devices of a chosen device's holders cost nothing more, so each first choice is tried.
        choices = (
            self._from(first, left, job.demand)
            for left in groups
            if len(left) >= job.demand
            for first in left
        )
        return min(choices, key=lambda devices: (*self._harm(devices), devices), default=())

    def _at_home(self, job: Gang, free: FreeDevices) -> tuple[int, ...]:
        """Return a free device for each rank of ``job`` where its state is; empty if there are too few."""
        chosen: list[int] = []
        for node in self._state.nodes.state_nodes(job)[: job.demand]:
            left = [device for device in free.on_node[node] if device not in chosen]
            if not left:
                return ()
            chosen.append(min(left, key=lambda device: (*self._harm((*chosen, device)), device)))
        return tuple(chosen)

    def _from(self, first: int, left: list[int], count: int) -> tuple[int, ...]:
        """Return ``count`` devices of ``left``: ``first`` and those that disturb least beside it."""
        chosen = [first]
        while len(chosen) < count:
            others = [device for device in left if device not in chosen]
            chosen.append(min(others, key=lambda device: (*self._harm((*chosen, device)), device)))
        return tuple(sorted(chosen))

    def _harm(self, devices: tuple[int, ...]) -> tuple[int, int, int, int, int, float]:
        """Return what borrowing ``devices`` disturbs, as a sort key.

        It counts the holders: a job that has just not left its devices, those that were late, those with
        guaranteed deadlines, all of them, and those in transit. Last come the seconds to switch them.
        """
        found = {holder.id: holder for device in devices for holder in self._state.holders(device)}
        holders = found.values()
        return (
            sum(holder is self._avoided for holder in holders),
            sum(holder.lateness.missed > 0 for holder in holders),
            sum(holder.guaranteed is True for holder in holders),
            len(holders),
            sum(holder.state in IN_TRANSIT for holder in holders),
            sum(self._state.switch_costs.predict_s(holder) or 0.0 for holder in holders),
        )

    def _lend(self, now: float) -> None:
        """Make the holders of borrowed devices lend them, and take earlier lenders back."""
        devices = [device for job in self._trying.values() for device in job.borrowed]
        lenders = {holder.id: holder for device in devices for holder in self._state.holders(device)}
        for job in [job for job in self._lenders.values() if job.id not in lenders]:
            job.take_back(now)
            self._state.tell_allocation(News.BEGUN, job)
            self._changed(job)
        for job in [job for job in lenders.values() if job.id not in self._lenders]:
            job.lend()
            self._changed(job)
        self._lenders = lenders

    def _changed(self, job: Gang) -> None:
        if not job.state.ended:
            self._state.reconcile_later(job)
