"""Where the state of a job is, when the plan wants the job elsewhere: devices for it at its own nodes."""

from __future__ import annotations

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.lifecycle.launches import relocate
from gpuslice.sched_core.lifecycle.node_map import nodes_of_ranks
from gpuslice.sched_core.lifecycle.state import State

#: The placement to which all devices are alike, and those to which only the number of nodes matters.
_ANY_DEVICES = "count"
_ANY_NODES = ("consolidated", "skew", "spread")


class Homes:
    """The devices where jobs have their processes and their state.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    placement
        The policy's placement; empty if the policy places jobs by itself. What a plan's nodes mean is in
        ``_ANY_DEVICES`` and ``_ANY_NODES``.
    """

    def __init__(self, state: State, placement: str = "") -> None:
        self._state = state
        #: Jobs whose state cannot be brought now, by id.
        self._stranded: dict[str, Gang] = {}
        self.use_placement(placement)

    def use_placement(self, placement: str) -> None:
        """Take plans from now on as those of a policy with ``placement``."""
        self._planned = placement != _ANY_DEVICES
        self._exact = self._planned and placement not in _ANY_NODES

    def redirect(self, job: Gang, now: float) -> None:
        """Insist that ``job`` goes to the devices that its owner wants, if it has no processes there.

        A job that is on its way to another node is redirected at once.
        """
        job.relocation.insist(insisted=self._state.nodes.misplaced(job))
        if not job.relocation.insisted:
            return
        job.relocation.stay(stays=False)
        if self._state.nodes.on_its_way(job):
            relocate(self._state, job, now)

    def look_at(self, job: Gang) -> None:
        """Note whether the state of ``job`` cannot be brought now to where its processes are to be."""
        if job.command.unreachable:
            self._stranded[job.id] = job

    def go_home(self, job: Gang, now: float) -> None:
        """Start ``job``, whose state cannot be brought, where the state is. It leaves once it has trained."""
        self._stranded.pop(job.id, None)
        relocate(self._state, job, now)
        job.relocation.stay()

    def return_unplanned(self, now: float) -> None:
        """Start jobs that are to have no devices, and whose state cannot be brought, where the state is."""
        nodes = self._state.nodes
        for job in list(self._stranded.values()):
            reached = not nodes.any_silent(nodes.state_nodes(job))
            if reached and not job.wanted and self._waits(job):
                self.go_home(job, now)

    def returning(self) -> tuple[Gang, tuple[int, ...]] | None:
        """Return a job whose state cannot be brought to its new node, and the devices to return to.

        Return None if there is no such job with devices. A job that its owner sent away does not count.
        """
        for job in list(self._stranded.values()):
            home = self._home(job) if job.running and self._waits(job) else ()
            if not self._is_stranded(job):
                del self._stranded[job.id]
            if home:
                return job, home
        return None

    def _waits(self, job: Gang) -> bool:
        """Return True if the state of ``job`` cannot be brought and its owner has not sent it."""
        return self._is_stranded(job) and not job.relocation.insisted

    def _is_stranded(self, job: Gang) -> bool:
        """Return True if the state of ``job`` cannot be brought to where its processes are to be."""
        return bool(job.command.unreachable) and self._state.nodes.on_its_way(job)

    def _home(self, job: Gang) -> tuple[int, ...]:
        """Return as many devices as ``job`` is to have, where its state is; empty if there are too few.

        Each is free or held only by jobs whose own state cannot be brought. These can have the devices of
        ``job``.
        """
        nodes = self._state.nodes
        home: list[int] = []
        for node in nodes.state_nodes(job)[: len(job.placement)]:
            usable = (d for d in nodes.cluster.on(node) if d not in home and self._is_home(job, d))
            device = next(usable, None)
            if device is None:
                return ()
            home.append(device)
        return tuple(home)

    def _is_home(self, job: Gang, device: int) -> bool:
        return job.may_have((device,)) and all(
            holder is job or self._waits(holder) for holder in self._state.holders(device)
        )

    def near_processes(self, job: Gang) -> tuple[int, ...]:
        """Return devices where the processes of ``job`` are, to use instead of its own; empty if none.

        Each device is free, or its only holder can run on a device that ``job`` has now. The result is also
        empty if the job can leave its nodes and the placement cares: the number of nodes differs from the
        plan's, or the policy wants certain nodes and the job has not trained yet.
        """
        nodes = self._state.nodes
        planned = nodes.of(job.placement)
        other = len({*planned}) != len({*nodes_of_ranks(job, len(planned))}) or (
            self._exact and not job.width
        )
        if self._planned and nodes.can_leave(job) and other:
            return ()
        found: list[int] = []
        for node in nodes_of_ranks(job, len(job.placement)):
            fitting = (d for d in nodes.cluster.on(node) if d not in found and self._fits(job, d))
            device = next(fitting, None)
            if device is None:
                return ()
            found.append(device)
        return tuple(found)

    def _fits(self, job: Gang, device: int) -> bool:
        holders = self._state.holders(device)
        if not job.may_have((device,)):
            return False
        if not holders or job in holders:
            return True
        (other, *more) = holders
        if other.relocation.insisted and self._state.nodes.misplaced(other):
            return False  # the other job's owner wants it here
        lone = not more and len(other.ranks) == 1 == len(job.ranks) and not other.lease
        elsewhere = self._state.nodes.of(job.placement)
        return lone and (not other.command.launched or other.nodes == elsewhere)
