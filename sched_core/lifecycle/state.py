"""What the parts of the core share: devices, nodes, jobs, who is on which device, and the commands so far.

The life cycle of jobs writes down here what has happened. The allocation of devices reads it and decides
which job is to have which devices. Neither calls the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from gpuslice.errors import IllegalTransitionError
from gpuslice.sched_core.jobs.closed_devices import ClosedDevices
from gpuslice.sched_core.jobs.command import Stage
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import Trigger
from gpuslice.sched_core.ledger import Ledger
from gpuslice.sched_core.wall_time import WallTime
from gpuslice.types import DeviceName
from gpuslice.wire import Dismiss, Resume, Suspend, Withdraw

from .events import Command, Event, Notice, Tell
from .node_map import NodeMap
from .switch_costs import SwitchCosts


class News(Enum):
    """What the life cycle of a job tells the allocation. All other changes are seen from the job itself."""

    PARKED = "parked"  # it has left its devices
    BEGUN = "begun"  # its time on its devices counts from now on, or from a known moment
    SETTLED = "settled"  # it attained more service after the plan had taken its devices
    STAYS = "stays"  # it does not leave its devices: they are its own until the policy plans anew


class State:
    """The facts that all parts of the core share.

    Parameters
    ----------
    devices
        The devices to schedule, node by node.
    ledger
        The devices that each job is to have by the policy's plan.
    device_memory_bytes
        The memory of each device; 0: not known.

    Attributes
    ----------
    occupants
        For each device, the jobs whose processes may be using it, by id.
    jobs
        All jobs ever submitted, by id, in order of submission.
    wall
        The time of day.
    unreconciled
        The jobs that are not yet where they are to be, or have something to do within a time limit, by id.
    closed
        The devices that are paused, reserved or drained.
    plan_due
        True if there is reason to ask the policy.
    """

    def __init__(
        self,
        devices: Sequence[DeviceName],
        nodes: NodeMap,
        ledger: Ledger,
        switch_costs: SwitchCosts,
        *,
        device_memory_bytes: int = 0,
    ) -> None:
        self.devices, self.nodes, self.ledger, self.switch_costs = devices, nodes, ledger, switch_costs
        self.device_memory_bytes = device_memory_bytes
        self.wall = WallTime()
        self.closed = ClosedDevices(devices, self.wall)
        self.occupants: list[dict[str, Gang]] = [{} for _ in devices]
        self.jobs: dict[str, Gang] = {}
        self.unreconciled: dict[str, Gang] = {}
        self.plan_due = False
        self._commands: list[Command] = []
        self._news: list[tuple[News, Gang]] = []
        self._touched: dict[str, Gang] = {}

    def known(self, name: str, event: Event) -> Gang:
        """Return the job ``name``, which ``event`` is about.

        Raises
        ------
        IllegalTransitionError
            If there is no such job.
        """
        if (job := self.jobs.get(name)) is None:
            raise IllegalTransitionError(
                f"there is no job {name!r}", f"it was named in a {type(event).__name__}"
            )
        return job

    @property
    def present(self) -> tuple[int, ...]:
        """The devices that were not removed, or that jobs still have to leave."""
        removed = self.closed.removed
        return tuple(device for device, on in enumerate(self.occupants) if on or device not in removed)

    def add_devices(self, names: Sequence[DeviceName]) -> None:
        """Have further devices from now on, at the end of the only node."""
        self.devices = self.switch_costs.devices = (*self.devices, *names)
        self.nodes.grow(self.devices)
        self.ledger.grow(len(names))
        self.closed.grow(names)
        self.occupants += [{} for _ in names]

    # Commands.

    def order(self, command: Command) -> None:
        """Add ``command`` to those that the shell is to carry out."""
        self._commands.append(command)

    def take_commands(self) -> list[Command]:
        """Return the commands that were ordered since the last call."""
        commands, self._commands = self._commands, []
        return commands

    def tell(self, job: Gang, rank: int, message: Resume | Suspend | Dismiss | Withdraw) -> None:
        """Order the shell to send ``message`` to rank ``rank`` of ``job``."""
        self.order(Tell(job.id, rank, message))

    # What the allocation is to look at.

    def touch(self, job: Gang) -> None:
        """Have the allocation look at ``job``: something has changed that may concern it."""
        self._touched[job.id] = job

    def tell_allocation(self, news: News, job: Gang) -> None:
        """Tell the allocation ``news`` of ``job``."""
        self._news.append((news, job))
        self.touch(job)

    def take_news(self) -> list[tuple[News, Gang]]:
        """Return what the allocation was told since the last call, in order."""
        news, self._news = self._news, []
        return news

    def take_touched(self) -> list[Gang]:
        """Return the jobs that the allocation is to look at, in the order in which they were touched."""
        touched, self._touched = list(self._touched.values()), {}
        return touched

    @property
    def was_told(self) -> bool:
        """True if there are news for the allocation."""
        return bool(self._news)

    @property
    def has_news(self) -> bool:
        """True if the allocation has something to look at."""
        return bool(self._news or self._touched)

    def reconcile_later(self, job: Gang) -> None:
        """Reconcile ``job`` after this event and the next ones, until nothing is left to do."""
        self.unreconciled[job.id] = job
        self.touch(job)

    # Who is where.

    def holders(self, device: int) -> list[Gang]:
        """Return the jobs that the policy's plan puts on ``device``."""
        return [self.jobs[holder.id] for holder in self.ledger.holders(device)]

    def occupy(self, job: Gang, devices: tuple[int, ...]) -> None:
        """Enter ``job`` as an occupant of ``devices``: its processes may be on them from now on."""
        if job.width and job.width != len(devices):
            self.order(Notice("resized", job.id, {"from": job.width, "to": len(devices)}))
        job.occupy(devices)
        for device in devices:
            self.occupants[device][job.id] = job

    def leave(self, job: Gang, trigger: Trigger, now: float) -> None:
        """Move ``job``, which has nothing on its devices any more, to a state without devices."""
        devices = job.lease
        job.move(trigger, now)
        for device in devices:
            del self.occupants[device][job.id]

    def vacate(self, job: Gang) -> None:
        """Remove ``job`` from the occupants of its devices: nothing of it is on them any more."""
        for device in job.lease:
            del self.occupants[device][job.id]
        job.vacate()

    def blocker(self, job: Gang) -> tuple[int, Gang] | None:
        """Return a device of ``job.wanted`` and a job that must leave it first. None if there is none.

        Jobs that share a device by the policy's plan do not block each other, unless one of them still has
        several devices. A trial shares nothing.
        """
        for device in job.wanted:
            sharers: Sequence[object] = () if job.borrowed else self.ledger.holders(device)
            for other in self.occupants[device].values():
                if other not in sharers or len(other.lease) > 1:
                    return device, other
        return None

    # What the life cycle asks of nodes.

    def misplaced(self, job: Gang) -> bool:
        """Return True if ``job`` is to have devices of nodes where it has no processes."""
        return self.nodes.misplaced(job)

    def can_leave(self, job: Gang) -> bool:
        """Return True if new processes on another node could continue ``job`` from its state now."""
        return self.nodes.can_leave(job)

    def is_to_start_ahead(self, job: Gang) -> bool:
        """Return True if the next process of ``job``, which is to leave, is to be started before."""
        nodes = self.nodes
        if not nodes.misplaced(job) or not nodes.may_start_ahead(job) or not job.may_have(job.lease):
            return False
        if not nodes.can_leave(job) and self.switch_costs.state_bytes(job):
            return False  # as was seen when it parked
        return job.relocation.ahead != (nodes.of(job.wanted)[0], job.attempt + 1)

    def is_ahead_in_vain(self, job: Gang) -> bool:
        """Return True if ``job`` does not go to the node where a process of it was started ahead."""
        if job.relocation.ahead is None or job.relocating:
            return False
        node, _ = job.relocation.ahead
        if job.command.stage is Stage.BRINGING:
            return node not in job.nodes
        return self.nodes.of(job.wanted)[:1] != (node,)

    def is_awaiting(self, job: Gang) -> bool:
        """Return True if ``job`` cannot go on without a node that does not answer."""
        return job.processes.cut_off or bool(self.nodes.awaited(job))
