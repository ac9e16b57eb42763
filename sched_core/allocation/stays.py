"""Jobs that stay on their node until a move to another one is worth what it costs.

A move to another node takes a start of the job's command. A policy that gives each job in turn the next free
device would have jobs on the move all the time. So a job stays on the node where it has arrived:

- until it has been there for so long that the move takes at most the switch share of its time, or
- until it has waited for as long as the move takes, while enough devices of another node were free. A job
  that has not trained yet does not wait for that.

Then the policy may place it anywhere, until it has arrived on another node. That holds for jobs of a fixed
size whose processes are all on one node.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from gpuslice.sched_core.jobs.accounts import Activity
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.lifecycle.state import State

from .planned_devices import PlannedDevices


class _Arrival(NamedTuple):
    """The node where a job is. ``trains`` is False before it has reached a boundary there."""

    node: int
    trains: bool


class Stays:
    """The jobs that stay on their nodes for now.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    planned
        The devices that jobs are to have by the plan.
    keeps
        True if the policy looks at ``Job.stays_on``. For other policies no job stays.
    any_devices
        True if all devices are alike to the policy's placement. Then also jobs stay that have not trained.
    """

    def __init__(self, state: State, planned: PlannedDevices, *, keeps: bool, any_devices: bool) -> None:
        self._state, self._planned, self._any = state, planned, any_devices
        self._keeps = keeps and not state.nodes.single
        self._arrivals: dict[str, _Arrival] = {}
        #: The jobs that stay, by id, and how long each is expected to stand still for a move.
        self._staying: dict[str, Gang] = {}
        self._costs_s: dict[str, float] = {}
        #: When stays are over because of the switch share; outdated unless the job stays until then.
        self._ends: list[tuple[float, str]] = []
        self._ends_s: dict[str, float] = {}
        #: Until when jobs stay that came back from another node, even if that has room.
        self._back_until_s: dict[str, float] = {}
        #: How long waiting jobs had waited when devices of another node became free, and when that is enough.
        self._idle_from: dict[str, float] = {}
        self._idle_until: tuple[float, str] = (inf, "")

    def change(self, now: float, *, keeps: bool, any_devices: bool) -> None:
        """Have jobs stay, or not, as another policy needs it. They have all just arrived where they are."""
        jobs = [self._state.jobs[name] for name in self._arrivals]
        for job in jobs:
            self._forget(job)
        self._any, self._keeps = any_devices, keeps and not self._state.nodes.single
        for job in jobs:
            self.look_at(job, now)

    def look_at(self, job: Gang, now: float) -> None:
        """Have ``job`` stay where it has arrived, or no longer where it has left."""
        if not self._keeps or job.spec.elastic:
            return
        arrival = self._arrival(job)
        if arrival == self._arrivals.get(job.id):
            return
        self._forget(job)
        if job.state.ended:
            self._back_until_s.pop(job.id, None)
        if arrival is None:
            return
        self._arrivals[job.id] = arrival
        cost_s = self._state.switch_costs.relocations.expected_s(job) or 0.0
        if stay_s := self._state.switch_costs.pays_after_s(cost_s):
            job.stays_on = arrival.node
            self._staying[job.id], self._costs_s[job.id] = job, cost_s
            self._end_at(job, now + stay_s)
            if job.relocation.stays:
                self._back_until_s[job.id] = now + stay_s

    def _arrival(self, job: Gang) -> _Arrival | None:
        """Return where ``job`` is. None if it is on several nodes, on its way or nowhere."""
        nodes, lost = set(job.nodes), self._state.nodes.any_silent(job.nodes)
        if len(nodes) != 1 or lost or not job.command.runs or job.state.ended:
            return None
        if self._state.nodes.whole.node_sizes[job.nodes[0]] < job.demand:
            return None  # its other nodes were silent when it was started
        if job.closed and not self._has_open_devices(job):
            return None
        home = job.state_nodes == job.nodes
        trains = job.processes.trains and home
        new = self._any and not job.state_nodes and job.ready
        return _Arrival(nodes.pop(), trains) if trains or new or (job.relocation.stays and home) else None

    def _has_open_devices(self, job: Gang) -> bool:
        """Return True if enough devices of the node of ``job`` are open to it."""
        on_node = self._state.nodes.whole.on(job.nodes[0])
        return sum(job.may_have((device,)) for device in on_node) >= job.demand

    def _end_at(self, job: Gang, end_s: float) -> None:
        self._ends_s[job.id] = end_s
        heappush(self._ends, (end_s, job.id))

    def end_due(self, now: float) -> None:
        """Let the policy place jobs elsewhere whose moves are worth it by now."""
        while self._ends and self._ends[0][0] <= now:
            end_s, name = heappop(self._ends)
            if self._ends_s.get(name) == end_s:
                self._end(self._staying[name], now)
        end_s, name = self._idle_until
        if end_s <= now and name in self._staying:
            self._end(self._staying[name], now)

    def _end(self, job: Gang, now: float) -> None:
        if not self._can_leave(job):
            self._end_at(job, now + self._costs_s[job.id])  # not from its present state
            return
        self._leave(job)
        if job.running:
            self._state.plan_due = True  # in the journal, as everything that policies see
        else:
            self._planned.plan_anew()

    def note_idle(self, now: float) -> None:
        """Note for how long jobs have waited while there were devices for them on other nodes."""
        self._idle_until = (inf, "")
        if not self._staying or not self._state.ledger.free:
            self._idle_from.clear()
            return
        free = self._free_by_node()
        for name, job in self._staying.items():
            if not any(count >= job.demand for node, count in enumerate(free) if node != job.stays_on):
                self._idle_from.pop(name, None)
                continue
            waited_s = job.without_devices_at(now)
            since_s = self._idle_from.setdefault(name, waited_s)
            waits = job.stretch.activity is Activity.WAITS and job.shown and not job.running
            if waits and self._can_leave(job):
                enough_s = self._costs_s[name] if job.state_nodes else 0.0
                until_s = max(now + enough_s - (waited_s - since_s), self._back_until_s.get(name, 0.0))
                self._idle_until = min(self._idle_until, (until_s, name))

    def _can_leave(self, job: Gang) -> bool:
        """Return True if ``job`` could go on elsewhere from its present state, or its next one."""
        return not job.relocation.stays and (
            bool(job.lease) or not job.width or self._state.nodes.can_leave(job)
        )

    def _free_by_node(self) -> list[int]:
        nodes, ledger = self._state.nodes, self._state.ledger
        return [
            sum(not ledger.holders(device) for device in nodes.cluster.on(node)) for node in nodes.numbers
        ]

    def due_s(self) -> float:
        """Return when a job that waits may go to a node with room; infinite if there is none.

        That the switch share allows a move matters only when the policy plans again.
        """
        return self._idle_until[0]

    def _leave(self, job: Gang) -> None:
        """Let ``job`` be placed on any node."""
        job.stays_on = None
        self._staying.pop(job.id, None)
        self._ends_s.pop(job.id, None)
        self._idle_from.pop(job.id, None)

    def _forget(self, job: Gang) -> None:
        """Forget where ``job`` has arrived. If the policy placed it only there, have the policy plan anew."""
        self._arrivals.pop(job.id, None)
        self._costs_s.pop(job.id, None)
        if job.id in self._staying:
            self._leave(job)
            if job.shown and not job.running:
                self._planned.plan_anew()
