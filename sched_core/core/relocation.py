"""Jobs and nodes: where a job's processes are started, and how they come to where its devices are.

A process stays on its node. A job that is to be on another node is parked first. Then its processes are ended
and others are started there, which go on from its snapshot if there is one. In the policy's plan the job has
its devices all the while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from types import MappingProxyType

from gpuslice.errors import UsageError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.jobs.gang import Gang

from . import launching
from .contract import CoreContract
from .events import Kill, NodeFound, NodeLost, Notice
from .launching import listed

#: The placement to which all devices are alike, and those to which only the number of nodes matters.
_ANY_DEVICES = "count"
_ANY_NODES = ("consolidated", "skew", "spread")


class Relocations:
    """The part of ``Core`` that knows on which nodes processes are.

    Parameters
    ----------
    core
        The core that this object is a part of.
    cluster
        All nodes.
    placement
        The policy's placement; empty if the policy places jobs by itself. With ``spread``, ranks are started
        on as many nodes as possible, otherwise on as few. What a plan's nodes mean is in ``_ANY_DEVICES``
        and ``_ANY_NODES``.

    Attributes
    ----------
    cluster
        The cluster without the nodes that are lost.
    """

    def __init__(self, core: CoreContract, cluster: Cluster, placement: str = "") -> None:
        self._core = core
        self._spread, self._planned = placement == "spread", placement != _ANY_DEVICES
        self._exact = self._planned and placement not in _ANY_NODES
        #: The whole cluster, and the cluster without lost nodes.
        self._cluster = self.cluster = cluster
        self._names = tuple(core.devices[cluster.on(node)[0]].node for node in range(len(cluster.node_sizes)))
        #: Lost nodes, and since when.
        self._lost: dict[int, float] = {}
        self._everywhere = tuple(range(len(self._names)))
        #: Jobs whose state cannot be brought now, and jobs sent by their owners to where they are to be.
        self._stranded: dict[str, Gang] = {}
        self._sent: set[str] = set()

    @property
    def several_nodes(self) -> bool:
        """True if there are other nodes than the scheduler's own, so that orders name their nodes."""
        return self._names != ("",)

    @property
    def lost(self) -> frozenset[str]:
        """The names of the nodes that are lost."""
        return frozenset(self._names[node] for node in self._lost)

    @property
    def lost_since_s(self) -> Mapping[int, float]:
        """The numbers of the lost nodes, and since when each is lost; for reading."""
        return MappingProxyType(self._lost)

    def named(self, nodes: tuple[int, ...]) -> tuple[str, ...]:
        """Return the names of ``nodes``."""
        return tuple(self._names[node] for node in nodes)

    def take(self, event: NodeLost | NodeFound, now: float) -> None:
        """Note that a node was lost or found, and keep jobs away from lost nodes.

        Jobs with processes on a lost node are withheld from the policy. Later events tell what becomes of
        them. Other jobs that were to have devices there wait.

        Raises
        ------
        UsageError
            If there is no such node.
        """
        if event.node not in self._names:
            raise UsageError(f"there is no node {event.node!r}", "start the scheduler anew to have it")
        node = self._names.index(event.node)
        if isinstance(event, NodeFound):
            self._lost.pop(node, None)
        else:
            self._lost.setdefault(node, now)
        self.cluster = self._cluster.without(self._lost)
        for job in [job for job in self._core.jobs.values() if not job.state.ended] if self._lost else ():
            self._cut_off(job, now)

    def _cut_off(self, job: Gang, now: float) -> None:
        """Take from ``job`` whatever it has to do with lost nodes: devices, a trial or a requested move."""
        planning = self._core.planning
        if self._is_lost(job.requested_devices):
            planning.moves.forget(job)
            job.history.append((now, "not to be moved: a node is lost"))
        if not job.processes_gone and not self._lost.keys().isdisjoint(job.nodes):
            planning.withhold(job, now)
            return
        if self._is_lost(job.borrowed):
            self._core.trials.leave(job, now)
            self._core.trials.enter(job)
        if job.running and self._is_lost(job.placement):
            planning.unassign(job, now)

    def _is_lost(self, devices: tuple[int, ...]) -> bool:
        """Return True if one of ``devices`` is on a lost node."""
        return not self._lost.keys().isdisjoint(self.of(devices))

    def check_usable(self, devices: tuple[int, ...]) -> None:
        """Raise ``UsageError`` if one of ``devices`` is on a lost node."""
        if self._is_lost(devices):
            names = ", ".join(sorted(self.lost))
            raise UsageError(
                f"nothing is heard of node {names}", "name devices of other nodes, or wait for it"
            )

    def misplaced(self, job: Gang) -> bool:
        """Return True if ``job`` is to have devices of nodes where it has no processes."""
        return len(self._names) > 1 and self.of(job.wanted) != _nodes(job, len(job.wanted))

    def begin(self, job: Gang, now: float) -> None:
        """End the processes of ``job``, which is parked, so that others can be started at its devices."""
        if job.relocation.ending or not self.can_leave(job):
            return
        job.relocation.leave_node(now, loses_time=bool(job.state_nodes))
        nodes = self.of(job.wanted) or self._state_nodes(job)
        there = ", ".join(self.named(tuple(sorted(set(nodes)))))
        job.history.append((now, f"to be started on {there or 'this node'}"))
        self._core.order(Kill(job.id, "it goes to another node", at_once=True))

    def redirect(self, job: Gang, now: float) -> None:
        """Insist that ``job`` goes to the devices that its owner wants, if it has no processes there.

        A job that is on its way to another node is redirected at once.
        """
        if not self.misplaced(job):
            self._sent.discard(job.id)
            return
        self._sent.add(job.id)
        job.relocation.stay(stays=False)
        if self._on_its_way(job):
            self.begin(job, now)

    def mark_state_unreachable(self, job: Gang) -> None:
        """Note that the state of ``job`` cannot be brought now to where its processes are to be."""
        self._stranded[job.id] = job

    def go_home(self, job: Gang, now: float) -> None:
        """Start ``job``, whose state cannot be brought, where the state is. It leaves once it has trained."""
        self._stranded.pop(job.id, None)
        self.begin(job, now)
        job.relocation.stay()

    def return_unplanned(self, now: float) -> None:
        """Start jobs that are to have no devices, and whose state cannot be brought, where the state is."""
        for job in list(self._stranded.values()):
            reached = self._lost.keys().isdisjoint(self._state_nodes(job))
            if reached and not job.wanted and self._waits(job):
                self.go_home(job, now)

    def returning(self) -> tuple[Gang, tuple[int, ...]] | None:
        """Return a job whose state cannot be brought to its new node, and the devices to return to.

        Return None if there is no such job with devices. A job that its owner sent away does not count.
        """
        for job in list(self._stranded.values()):
            home = self._home(job) if job.running and self._waits(job) else ()
            if not job.command.unreachable or not self._on_its_way(job):
                del self._stranded[job.id]
            if home:
                return job, home
        return None

    def _waits(self, job: Gang) -> bool:
        """Return True if the state of ``job`` cannot be brought and its owner has not sent it."""
        return bool(job.command.unreachable) and job.id not in self._sent and self._on_its_way(job)

    def _home(self, job: Gang) -> tuple[int, ...]:
        """Return as many devices as ``job`` is to have, where its state is; empty if there are too few.

        Each is free or held only by jobs whose own state cannot be brought. These can have the devices of
        ``job``.
        """
        home: list[int] = []
        for node in self._state_nodes(job)[: len(job.placement)]:
            usable = (d for d in self.cluster.on(node) if d not in home and self._is_home(job, d))
            device = next(usable, None)
            if device is None:
                return ()
            home.append(device)
        return tuple(home)

    def _on_its_way(self, job: Gang) -> bool:
        """Return True if processes of ``job`` are started on another node, and none has greeted yet."""
        if job.processes.first_hello_s is not None or job.relocation.ending or job.state.ended:
            return False
        return job.relocation.gone_s is not None or (job.command.runs and bool(self.origin(job)))

    def _is_home(self, job: Gang, device: int) -> bool:
        return all(holder is job or self._waits(holder) for holder in self._core.holders(device))

    def go_on(self, job: Gang, now: float) -> None:
        """Start ``job``, which has no process left on its former nodes, on its new nodes."""
        former = job.nodes
        job.begin_elsewhere(now)
        self._core.switch_costs.forget(job)
        launching.launch(self._core, job, now)
        details = {"from": listed(self.named(former)), "to": listed(self.named(job.nodes))}
        self._core.order(Notice("relocated", job.id, details))
        self._core.reconcile_later(job)

    def arrived(self, job: Gang, now: float) -> None:
        """Note that ``job`` trains. If it was restarted, send a notice of how long it stood still."""
        self._sent.discard(job.id)
        job.relocation.trained()
        left_s, gone_s = job.relocation.left_s, job.relocation.gone_s
        first_hello_s = job.processes.first_hello_s
        if left_s is None or gone_s is None or first_hello_s is None:
            return
        blackout_s = now - left_s
        details = {
            "blackout_s": blackout_s,
            "ending_s": gone_s - left_s,
            "bringing_s": first_hello_s - gone_s,
            "setup_s": now - first_hello_s,
        }
        job.relocation.arrived()
        if not job.spec.relaunch:
            self._core.switch_costs.relocated(blackout_s)
        self._core.order(Notice("arrived", job.id, details))

    def place(self, job: Gang) -> None:
        """Choose the nodes of ``job``, whose processes are to be started."""
        job.nodes = self._choose(job)
        self.confine(job)

    def origin(self, job: Gang) -> tuple[str, ...]:
        """Return the node where the state of each rank that keeps some is; empty if its process is there.

        Return nothing for a command that is started anew for other devices: it keeps its own state.
        """
        if job.spec.relaunch:
            return ()
        state = self._state_nodes(job)[: job.keepers]
        return self.named(state) if state != job.nodes[: len(state)] else ()

    def _state_nodes(self, job: Gang) -> tuple[int, ...]:
        """Return the node of each rank's newest state, even if another number of ranks left it."""
        return job.state_nodes[:1] * len(job.ranks) if job.spec.elastic else job.state_nodes

    def can_leave(self, job: Gang) -> bool:
        """Return True if ``job``, which is parked, can go on elsewhere: with no state, or one to be sent.

        The scheduler does not know the checkpoints of a command that is started anew for other devices. They
        count as being where it trained, unless that node is lost.
        """
        if job.spec.relaunch:
            return not job.state_nodes or not self._lost.keys().isdisjoint(job.state_nodes)
        return not job.relocation.stays and (not job.width or job.portable)

    def restrict(self, job: Gang) -> None:
        """Tell policies to keep ``job``, which is new, on any one node if it is elastic."""
        if job.spec.elastic and len(self._names) > 1:
            job.within = self._everywhere

    def confine(self, job: Gang) -> None:
        """Tell policies whether ``job``, if it is elastic, must stay on its present node."""
        if job.within and (job.spec.relaunch or not job.lease):
            leaves = self.can_leave(job) and not job.bound
            job.within = self._everywhere if leaves else job.nodes[:1]

    def wish(self, job: Gang) -> tuple[int, ...]:
        """Return devices where the processes of ``job`` are, to use instead of its own; empty if none.

        Each device is free, or its only holder can run on a device that ``job`` has now. The result is also
        empty if the job can leave its nodes and the placement cares: the number of nodes differs from the
        plan's, or the policy wants certain nodes and the job has not trained yet.
        """
        planned = self.of(job.placement)
        other = len({*planned}) != len({*_nodes(job, len(planned))}) or (self._exact and not job.width)
        if self._planned and self.can_leave(job) and other:
            return ()
        found: list[int] = []
        for node in _nodes(job, len(job.placement)):
            device = next((d for d in self.cluster.on(node) if d not in found and self._fits(job, d)), None)
            if device is None:
                return ()
            found.append(device)
        return tuple(found)

    def _fits(self, job: Gang, device: int) -> bool:
        holders = self._core.holders(device)
        if not holders or job in holders:
            return True
        (other, *more) = holders
        if other.id in self._sent and self.misplaced(other):
            return False  # the other job's owner wants it here
        lone = not more and len(other.ranks) == 1 == len(job.ranks) and not other.lease
        return lone and (not other.command.launched or other.nodes == self.of(job.placement))

    def in_order(self, devices: Sequence[int]) -> Sequence[int]:
        """Return ``devices`` sorted by node, since launchers number the ranks of each node in a row.

        On each node they stay in their order: a state may be able to come back only to its own device.
        """
        if len(self._names) == 1:
            return devices
        return sorted(devices, key=self._cluster.node_of.__getitem__)

    def of(self, devices: tuple[int, ...]) -> tuple[int, ...]:
        """Return the node of each of ``devices``."""
        return tuple(self._cluster.node_of[device] for device in devices)

    def _choose(self, job: Gang) -> tuple[int, ...]:
        """Return the node to start each rank of ``job`` on.

        These are the nodes of its devices if it is to have some, else those of its state, else those with the
        least load. Those of its state come first if that cannot be brought.
        """
        if len(self._names) == 1:
            return (0,) * len(job.ranks)
        home = job.state_nodes and self._lost.keys().isdisjoint(job.state_nodes)
        if job.wanted and not (home and job.relocation.stays):
            wanted = self.of(job.wanted)
            return wanted[:1] * len(job.ranks) if job.spec.elastic else wanted
        if home:
            return self._state_nodes(job)
        load = [0] * len(self._names)
        for other in self._core.jobs.values():
            if other is not job and not other.processes_gone:
                for node in other.nodes:
                    load[node] += 1
        sizes = self.cluster.node_sizes
        nodes = sorted(
            (node for node, size in enumerate(sizes) if size),
            key=lambda n: (sizes[n] < len(job.ranks), load[n] / sizes[n], n),
        )
        if job.spec.elastic:
            return tuple(nodes[:1]) * len(job.ranks)
        if self._spread:
            slots = [node for number in range(max(sizes)) for node in nodes if number < sizes[node]]
        else:
            slots = [node for node in nodes for _ in range(sizes[node])]
        # Ranks in excess of the devices wait on these nodes, and move when a node is found.
        return tuple(sorted(islice(cycle(slots), len(job.ranks))))


def _nodes(job: Gang, count: int) -> tuple[int, ...]:
    """Return the nodes of the first ``count`` ranks of ``job``; of an elastic job all one node."""
    return job.nodes[:1] * count if job.spec.elastic else job.nodes[:count]
