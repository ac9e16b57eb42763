"""The scheduler's mind: events in, commands out. No sockets, no processes, no clock.

Policies say who shall hold which devices (``Allotment``, the ledger of what is wanted). Reality follows more
slowly: a job stops at a boundary, then parks, and only when all its ranks have does the device change hands.
The core keeps the jobs in which the two differ in a list and works on it after every event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType

from gpuslice.errors import IllegalTransitionError, UsageError
from gpuslice.types import DeviceName
from gpuslice.wire import Resume
from gpuslice.wire import Suspend as SuspendMessage

from .allotment import Allotment
from .cluster import Cluster
from .events import (
    Cancelled,
    Command,
    Event,
    Exited,
    Held,
    Kill,
    Launch,
    RankGone,
    Released,
    Reported,
    Submitted,
    Tell,
    WakeAt,
    Woken,
)
from .gang import Gang, RankPhase
from .invariants import check
from .policy import Changes, Migrate, Plan, Policy, PolicyError, Start, Stop, Suspend, View
from .reports import Reports
from .states import IN_TRANSIT, JobState, Trigger


class Core:
    """Who runs where, now.

    Parameters
    ----------
    devices
        What there is to give away, all on one node.
    policy
        Who decides.
    """

    def __init__(self, devices: Sequence[DeviceName], policy: Policy) -> None:
        cluster = Cluster([len(devices)])
        self.devices = tuple(devices)
        #: Jobs whose processes are using a device, by device.
        self.occupants: list[dict[str, Gang]] = [{} for _ in devices]
        self.allotment = Allotment(cluster, policy.name)
        self._policy = policy
        self._jobs: dict[str, Gang] = {}
        #: The jobs a policy may choose from: ready and not ended.
        self._eligible: dict[str, Gang] = {}
        self._view = View(cluster, self._eligible)
        #: Jobs that are held from now on; the policy is still to be told.
        self._withdrawn: list[Gang] = []
        #: Jobs whose lease is not what the policy wants, or that wait for another try.
        self._unsettled: dict[str, Gang] = {}
        self._plan_wake_s: float | None = None
        self._wake_s: float | None = None
        self._commands: list[Command] = []
        self._replan = False
        self._reports = Reports(self)

    @property
    def jobs(self) -> Mapping[str, Gang]:
        """Every job there ever was, by id, in order of submission; for reading."""
        return MappingProxyType(self._jobs)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take note of ``event`` and say what is to be done.

        Raises
        ------
        IllegalTransitionError
            If ``event`` cannot happen now; nothing was changed.
        UsageError
            If a job is submitted that could never run; nothing was changed.
        """
        match event:
            case Submitted():
                self._submit(event, now)
            case Reported():
                self._reports.take(self._known(event.job, event), event.rank, event.message, now)
            case RankGone():
                self._rank_gone(event, now)
            case Exited():
                self._exited(event, now)
            case Cancelled():
                job = self._known(event.job, event)
                self.end(job, Trigger.CANCEL, event.reason, now)
            case Held():
                self._hold(self._known(event.job, event), now)
            case Released():
                self._release(self._known(event.job, event), now)
            case Woken():
                self._wake_s = None
                self._replan = True
        self._pursue(now)
        commands, self._commands = self._commands, []
        return commands

    def check(self) -> None:
        """Raise ``InvariantError`` if a promise is broken."""
        check(self)

    # What the handlers of reports use.

    def tell(self, job: Gang, rank: int, message: Resume | SuspendMessage) -> None:
        """Ask for ``message`` to be sent."""
        self._commands.append(Tell(job.id, rank, message))

    def resume_rank(self, job: Gang, rank: int) -> None:
        """Tell a parked rank to come (back) to its device."""
        job.ranks[rank].phase = RankPhase.COMING
        self.tell(job, rank, Resume(epoch=job.epoch, device=str(self.devices[job.lease[rank]])))

    def announce(self, job: Gang) -> None:
        """Let the policy know of a job that is ready to run, unless its owner holds it."""
        if job.held:
            return
        self._eligible[job.id] = job
        if not self._view.changes.reset:
            self._view.changes.arrived.append(job)
        self._replan = True

    def settle(self, job: Gang, now: float) -> None:
        """See whether the ranks of ``job`` have all got where they were told to go."""
        if job.all_on() and job.allows(Trigger.ALL_ON):
            job.move(Trigger.ALL_ON, now)
            if job.running:
                job.since_s = now
            job.first_start_s = now if job.first_start_s is None else job.first_start_s
            self._replan = True
        elif job.all_parked() and job.allows(Trigger.ALL_PARKED):
            job.move(Trigger.ALL_PARKED, now)
            self._vacate(job)

    def unsettle(self, job: Gang) -> None:
        """Look at ``job`` again after this event and those that follow, until nothing is left to do."""
        self._unsettled[job.id] = job

    def end(self, job: Gang, trigger: Trigger, reason: str, now: float) -> None:
        """End ``job``: succeeded, failed or cancelled.

        Raises
        ------
        IllegalTransitionError
            If it has ended before.
        """
        job.move(trigger, now)
        job.reason, job.ended_s = reason, now
        self._unsettled.pop(job.id, None)
        self._withdraw(job, now)
        if job.processes_gone:
            self._vacate(job)
        else:
            self._commands.append(Kill(job.id, reason or job.state.value))

    # The other events.

    def _submit(self, event: Submitted, now: float) -> None:
        spec = event.spec
        if spec.id in self._jobs:
            raise self._jobs[spec.id].illegal("submitted again")
        if not 1 <= spec.demand <= len(self.devices):
            raise UsageError(
                f"job {spec.id} asks for {spec.demand} devices of {len(self.devices)}",
                "ask for as many as there are",
            )
        job = self._jobs[spec.id] = Gang(spec, len(self._jobs), event.program)
        job.history.append((now, "submitted"))
        self._commands.append(Launch(spec.id, event.program))

    def _rank_gone(self, event: RankGone, now: float) -> None:
        job = self._known(event.job, event)
        if not 0 <= event.rank < len(job.ranks):
            raise job.illegal(f"end of rank {event.rank}")
        rank = job.ranks[event.rank]
        if rank.phase is RankPhase.ABSENT and job.state.ended:
            return
        if rank.phase in (RankPhase.ABSENT, RankPhase.GONE):
            raise job.illegal(f"end of rank {event.rank}, which is {rank.phase.value}")
        left_by_itself = rank.phase is RankPhase.LEAVING
        rank.phase = RankPhase.GONE
        if job.state.ended:
            self._vacate_if_gone(job)
        elif len(job.ranks) > 1 and not left_by_itself and not event.unseen:
            self.end(job, Trigger.FAIL, f"rank {event.rank} died", now)
        else:
            self.settle(job, now)

    def _exited(self, event: Exited, now: float) -> None:
        job = self._known(event.job, event)
        if job.exit_code is not None:
            raise job.illegal(f"second exit with code {event.code}")
        job.exit_code = event.code
        if job.state.ended:
            self._vacate_if_gone(job)
        elif event.code == 0:
            self.end(job, Trigger.SUCCEED, "", now)
        else:
            self.end(job, Trigger.FAIL, f"it ended with exit code {event.code}", now)

    def _hold(self, job: Gang, now: float) -> None:
        if job.state.ended or job.held:
            raise job.illegal("suspend by its owner")
        job.held = True
        job.history.append((now, "held by its owner"))
        self._withdraw(job, now)
        self._withdrawn.append(job)
        self.unsettle(job)

    def _release(self, job: Gang, now: float) -> None:
        if job.state.ended or not job.held:
            raise job.illegal("resume by its owner")
        job.held = False
        job.history.append((now, "released by its owner"))
        if job.ready:
            self.announce(job)

    def _withdraw(self, job: Gang, now: float) -> None:
        """Take from the policy a job that it can no longer choose."""
        if self._eligible.pop(job.id, None) is not None and not self._view.changes.reset:
            self._view.changes.finished.append(job)
        if job.running:
            job.settle(now)
            self.allotment.release(job)
        self._replan = True

    def _known(self, name: str, event: Event) -> Gang:
        job = self._jobs.get(name)
        if job is None:
            raise IllegalTransitionError(
                f"there is no job {name!r}", f"it was named in a {type(event).__name__}"
            )
        return job

    # Wanted and real.

    def _pursue(self, now: float) -> None:
        """Ask the policy if there is reason to, then do what can be done towards what it wants."""
        while self._replan:
            self._replan = False
            self._view.now_s = now
            plan = self._policy.plan(self._view)
            self._view.changes = Changes()
            # Only now: the policy had to see who held devices.
            for job in self._withdrawn:
                job.running, job.since_s = False, now
            self._withdrawn.clear()
            self._adopt(plan, now)
        for job in list(self._unsettled.values()):
            self._approach(job, now)
        waits = [job.retry_at_s for job in self._unsettled.values() if job.retry_at_s > now]
        wake_s = min((when for when in (self._plan_wake_s, *waits) if when is not None), default=None)
        if wake_s != self._wake_s:
            self._wake_s = wake_s
            self._commands.append(WakeAt(wake_s))

    def _adopt(self, plan: Plan, now: float) -> None:
        """Enter ``plan`` in the ledger: release first, then grant."""
        if plan.wake_at_s is not None and plan.wake_at_s <= now:
            raise PolicyError(f"policy {self._policy.name} asks at {now} to be woken at {plan.wake_at_s}")
        self._plan_wake_s = None if plan.wake_at_s == inf else plan.wake_at_s
        grants: list[tuple[Start | Migrate, Gang]] = []
        for decision in plan.decisions:
            running = None if isinstance(decision, Stop) else not isinstance(decision, Start)
            job = self.allotment.check(self._eligible, decision.job, plan, running=running)
            if isinstance(decision, Stop):
                self.end(job, Trigger.CANCEL, decision.reason, now)
                continue
            self.unsettle(job)
            if isinstance(decision, Suspend | Migrate):
                job.settle(now)
                self.allotment.release(job)
                job.running, job.since_s = False, now
                job.preemptions += isinstance(decision, Suspend)
                job.migrations += isinstance(decision, Migrate)
            if isinstance(decision, Start | Migrate):
                grants.append((decision, job))
        for grant, job in grants:
            self.allotment.grant(job, grant.devices, shared=grant.shared, plan=plan)
            # It makes progress from the moment all its ranks are on the device, see settle().
            job.running, job.placement, job.since_s = True, grant.devices, inf

    def _approach(self, job: Gang, now: float) -> None:
        if now < job.retry_at_s:
            return
        if job.state is JobState.RUNNING and job.lease != job.wanted:
            job.move(Trigger.REVOKE, now)
            job.overshoots = 0
            self._reports.aim(job, max(rank.boundary for rank in job.ranks) + 1)
        elif job.state in (JobState.QUEUED, JobState.SUSPENDED) and job.wanted and self._can_enter(job):
            self._grant(job, now)
        elif job.state in IN_TRANSIT:
            self._reports.try_again(job)
        if job.lease == job.wanted and job.state not in IN_TRANSIT:
            self._unsettled.pop(job.id, None)

    def _can_enter(self, job: Gang) -> bool:
        """Whether nobody is on the devices but those who share them with ``job``."""
        return all(
            other in self.allotment.holders(device)
            for device in job.wanted
            for other in self.occupants[device].values()
        )

    def _grant(self, job: Gang, now: float) -> None:
        job.move(Trigger.GRANT, now)
        job.epoch += 1
        job.lease = job.wanted
        job.refusals = 0
        for device in job.lease:
            self.occupants[device][job.id] = job
        for rank in job.present(RankPhase.PARKED):
            self.resume_rank(job, rank.number)

    def _vacate(self, job: Gang) -> None:
        """Nothing of ``job`` is on its devices any more."""
        for device in job.lease:
            del self.occupants[device][job.id]
        job.lease = ()

    def _vacate_if_gone(self, job: Gang) -> None:
        if job.processes_gone:
            self._vacate(job)
