"""The core of the scheduler: events in, commands out. No sockets, no processes, no clock.

An event passes through the core once. The life cycle of jobs learns what has happened. What is late by now is
handled. The allocation decides which job is to have which devices. Then each job takes the steps that are
possible towards its devices. The processes follow more slowly: a job stops at a boundary, then parks, and a
device changes hands only when all ranks of its job have parked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType

from gpuslice.sched_core.allocation.allocation import Allocation
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.ledger import Ledger
from gpuslice.sched_core.lifecycle import ahead, launching
from gpuslice.sched_core.lifecycle.events import (
    Adjusted,
    ArraySubmitted,
    Brought,
    Cancelled,
    Clocked,
    Command,
    Computed,
    DevicesUsed,
    Drained,
    Event,
    Exited,
    Held,
    Kept,
    Limited,
    Measured,
    Moved,
    NodeFound,
    NodeLost,
    NodeSilent,
    NoRoom,
    Noted,
    Notice,
    Paused,
    PortFound,
    RankGone,
    Released,
    Reported,
    Requeued,
    Reserved,
    SettingsChanged,
    StateWaits,
    Submitted,
    TakenOver,
    Undrained,
    Unpaused,
    Unreserved,
    WaitsAhead,
    WakeAt,
    Weighted,
    Woken,
    job_of,
    submitted,
)
from gpuslice.sched_core.lifecycle.invariants import check
from gpuslice.sched_core.lifecycle.node_map import NodeMap
from gpuslice.sched_core.lifecycle.rank_processes import RankProcesses
from gpuslice.sched_core.lifecycle.rank_reports import RankReports
from gpuslice.sched_core.lifecycle.reconciliation import Reconciliation
from gpuslice.sched_core.lifecycle.state import State
from gpuslice.sched_core.lifecycle.switch_costs import SwitchCosts
from gpuslice.sched_core.policy import Policy, placement_of
from gpuslice.sched_core.switch_cost_model import SWITCH_SHARE
from gpuslice.types import DeviceName
from gpuslice.wire import Progress

from . import device_requests, kept_jobs, owner_requests, settings
from .absences import Absences
from .settings import MakePolicy
from .time_limits import TimeLimits

#: A policy is asked at most so often at one moment, and then again so many seconds later. Without that,
#: a policy that changes its answer each time would be asked for ever.
MOST_PLANS = 8
ASK_AGAIN_S = 0.1


class Core:
    """The state of all jobs and devices, and the rules by which events change it.

    Parameters
    ----------
    devices
        The devices to schedule, node by node.
    policy
        The policy that decides which job has which devices.
    switch_share
        The share of time that switching may take. The policy is told how long a slice must last for that.
    quotas
        How many devices the jobs of a tenant may ask for together; tenants without one have no limit.
    device_memory_bytes
        The memory of each device; 0: not known.
    sockets
        The number of CPU sockets of each node. The node's devices belong to them in equal parts, in order.
    make_policy
        Makes the policies that ``SettingsChanged`` asks for. None: there is no other policy.
    starts_ahead
        True if a job that changes its node has its process started there before its state has come.

    Attributes
    ----------
    state
        The facts: jobs, devices, nodes, who is where.
    allocation
        The part that decides which job is to have which devices.
    """

    def __init__(
        self,
        devices: Sequence[DeviceName],
        policy: Policy,
        *,
        switch_share: float = SWITCH_SHARE,
        quotas: Mapping[str, int] | None = None,
        device_memory_bytes: int = 0,
        sockets: int = 1,
        make_policy: MakePolicy | None = None,
        starts_ahead: bool = False,
    ) -> None:
        spread = placement_of(policy) == "spread"
        nodes = NodeMap(devices, sockets, spread=spread, starts_ahead=starts_ahead)
        ledger = Ledger(nodes.cluster, policy.name)
        costs = SwitchCosts(switch_share, tuple(devices))
        self.state = State(tuple(devices), nodes, ledger, costs, device_memory_bytes=device_memory_bytes)
        self.allocation = Allocation(self.state, policy, quotas or {})
        self._processes = RankProcesses(self.state)
        self._reports = RankReports(self.state, self._processes, needs_durations=policy.needs_durations)
        self._reconciliation = Reconciliation(
            self.state, self._processes, self.allocation.prestart.offer, self.allocation.throughput.rate
        )
        self._make_policy = make_policy
        self._absences, self._time_limits = Absences(self.state), TimeLimits(self.state)
        #: The last wake time that was ordered. None: there is none.
        self._wake_s: float | None = None

    @property
    def devices(self) -> Sequence[DeviceName]:
        """The devices, node by node."""
        return self.state.devices

    @property
    def jobs(self) -> Mapping[str, Gang]:
        """All jobs ever submitted, by id, in order of submission; for reading."""
        return MappingProxyType(self.state.jobs)

    @property
    def unreconciled(self) -> Mapping[str, Gang]:
        """The jobs that are not yet where they are to be, by id; for reading."""
        return MappingProxyType(self.state.unreconciled)

    @property
    def ledger(self) -> Ledger:
        """The devices that each job is to have by the policy's plan; for reading."""
        return self.state.ledger

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply ``event`` and return the commands that the shell must carry out.

        Raises
        ------
        IllegalTransitionError
            If ``event`` cannot happen now; nothing was changed.
        UsageError
            If a submitted job could never run, or a request is impossible; nothing was changed.
        """
        if isinstance(event, Noted):
            return []
        plans = self.allocation.planning.plans
        self._learn(event, now)
        if (job := self.state.jobs.get(job_of(event))) is not None:
            self.state.touch(job)
        self.allocation.learn(now)
        self._decide(now)
        self._order_wake_time(now)
        self.allocation.waits.update(now)
        commands = self.state.take_commands()
        return commands if commands or self.allocation.planning.plans == plans else _kept(event)

    def _learn(self, event: Event, now: float) -> None:
        """Write down what ``event`` says."""
        state, allocation = self.state, self.allocation
        match event:
            case Submitted() | ArraySubmitted():
                self._submit(event, now)
            case Reported():
                self._reports.take(state.known(event.job, event), event.rank, event.message, now)
                self._absences.heard(state.jobs[event.job], event.message)
            case RankGone():
                self._processes.gone(state.known(event.job, event), event, now)
            case Exited():
                launching.exited(state, state.known(event.job, event), event, now)
            case Brought() | StateWaits() | PortFound():
                launching.take(state, state.known(event.job, event), event, now)
            case NoRoom():
                allocation.use_room(state.known(event.job, event), state.nodes.numbered(event.nodes))
            case WaitsAhead():
                ahead.waits(state, state.known(event.job, event), event, now)
            case Cancelled() | Held() | Released() | Moved() | Weighted() | Adjusted() | Requeued():
                owner_requests.apply(state, allocation, state.known(event.job, event), event, now)
            case Paused() | Unpaused() | Drained() | Undrained() | Reserved() | Unreserved():
                device_requests.apply(state, event, now)
                allocation.use_open_devices(now)
            case Clocked() | DevicesUsed():
                device_requests.apply(state, event, now)
                allocation.use_open_devices(now)
            case Kept():
                owner_requests.keep(state, event, now)
            case TakenOver():
                kept_jobs.take_over(state, allocation, event, now)
            case SettingsChanged():
                settings.change(state, allocation, self._make_policy, event, now)
                self._reports.needs_durations = allocation.planning.needs_durations
            case Woken():
                self._wake_s = None
                state.plan_due = True
                if device_requests.expire(state, now):
                    allocation.use_open_devices(now)
                self._reconciliation.expire(now)
                self._absences.expire(now)
                self._time_limits.expire(now)
                allocation.starts.expire(now)
                allocation.first_jobs.expire(now)
            case Computed():
                state.plan_due |= allocation.planning.computations.take(event)
            case Measured():
                state.known(event.job, event)
                allocation.throughput.take(event, state.jobs, now)
                state.plan_due = True
            case Limited():
                allocation.prestart.set_limit(event.prestart)
            case NodeSilent() | NodeLost() | NodeFound():
                allocation.use_nodes(self._absences.take(event, now), now)

    def _decide(self, now: float) -> None:
        """Decide who is to have which devices, and take the steps towards that, until nothing changes."""
        state, allocation = self.state, self.allocation
        for _ in range(MOST_PLANS):
            allocation.decide(now)
            self._reconciliation.take_steps(now)
            allocation.start_ahead(now)
            heard = state.was_told
            allocation.learn(now)
            if not (state.plan_due or heard):
                break  # no step made a new plan necessary
        allocation.deadlines.report_missed(now)

    def _order_wake_time(self, now: float) -> None:
        """Order the next ``Woken``, if it is not the one that was ordered last."""
        again_s = now + ASK_AGAIN_S if self.state.plan_due else inf
        parts = (self._absences, self._time_limits, self.state.closed, self.allocation)
        due_s = min(self._reconciliation.due_s(now), again_s, *(part.due_s() for part in parts))
        wake_s = None if due_s == inf else due_s
        if wake_s != self._wake_s:
            self._wake_s = wake_s
            self.state.order(WakeAt(wake_s))

    def become(self, other: Core) -> None:
        """Take over the state of ``other``, for good: both cores share all of it."""
        self.__dict__ = other.__dict__

    def check(self) -> None:
        """Raise ``InvariantError`` if an invariant of the core is broken."""
        check(self.state)

    def _submit(self, event: Submitted | ArraySubmitted, now: float) -> None:
        jobs, found = self.state.jobs, list(submitted(event))
        for spec, _ in found:
            if spec.id in jobs:
                raise jobs[spec.id].illegal("submitted again")
            owner_requests.check_submission(self.state, self.allocation, spec)
        for spec, program in found:
            job = jobs[spec.id] = Gang(spec, len(jobs), program)
            job.history.append((now, "submitted"))
            if spec.hold:
                owner_requests.hold(self.state, job, now)
            job.book(now)
            self.allocation.enter(job, now)


def _kept(event: Event) -> list[Command]:
    """Return a notice if ``event``, at which the policy was asked, is a heartbeat; else nothing.

    The journal leaves out heartbeats from which nothing follows, and a policy that is asked at another moment
    may decide otherwise.
    """
    if isinstance(event, Reported) and isinstance(event.message, Progress):
        return [Notice("planned", event.job)]
    return []
