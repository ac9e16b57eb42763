"""The nodes as the core knows them: their devices, which of them answer, and where jobs have processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from math import inf
from types import MappingProxyType

from gpuslice.errors import UsageError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.jobs.command import Stage
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.types import DeviceName


class NodeMap:
    """The nodes, with the devices of each.

    Parameters
    ----------
    devices
        The devices, node by node.
    sockets
        The number of CPU sockets of each node. The node's devices belong to them in equal parts, in order.
    spread
        True if the ranks of a job are started on as many nodes as possible, else on as few as possible.
    starts_ahead
        True if a process of a job that changes its node is started there before its state has come.

    Attributes
    ----------
    whole, cluster
        All nodes, and the cluster without those that are silent or lost, and without paused devices.
    """

    def __init__(
        self,
        devices: Sequence[DeviceName],
        sockets: int = 1,
        *,
        spread: bool = False,
        starts_ahead: bool = False,
    ) -> None:
        self.spread, self._sockets, self._starts_ahead = spread, sockets, starts_ahead
        self.whole = self.cluster = _cluster(devices, sockets)
        self._names = tuple(devices[self.whole.on(node)[0]].node if devices else "" for node in self.numbers)
        #: The nodes that do not answer, and since when; those of them whose lease has run out.
        self._silent: dict[int, float] = {}
        self._lost: set[int] = set()
        self._paused: frozenset[int] = frozenset()

    @property
    def numbers(self) -> range:
        """The numbers of all nodes."""
        return range(len(self.whole.node_sizes))

    @property
    def single(self) -> bool:
        """True if there is one node only."""
        return len(self._names) == 1

    @property
    def own_only(self) -> bool:
        """True if there is only the scheduler's own node, so that orders need not name it."""
        return self._names == ("",)

    @property
    def own(self) -> int | None:
        """The number of the scheduler's own node. None if no device is there."""
        return self._names.index("") if "" in self._names else None

    @property
    def lost(self) -> frozenset[str]:
        """The names of the nodes that are lost: their lease has run out."""
        return frozenset(self._names[node] for node in self._lost)

    @property
    def silent(self) -> frozenset[str]:
        """The names of the nodes that do not answer. Those that are lost are among them."""
        return frozenset(self._names[node] for node in self._silent)

    @property
    def silent_since_s(self) -> Mapping[int, float]:
        """The numbers of the nodes that do not answer, and since when; for reading."""
        return MappingProxyType(self._silent)

    def named(self, nodes: Sequence[int]) -> tuple[str, ...]:
        """Return the names of ``nodes``."""
        return tuple(self._names[node] for node in nodes)

    def fall_silent(self, name: str, now: float) -> None:
        """Note that node ``name`` does not answer since ``now``.

        Raises
        ------
        UsageError
            If there is no such node.
        """
        self._silent.setdefault(self._number(name), now)
        self._change_cluster()

    def lose(self, name: str, now: float) -> None:
        """Note that the lease of the silent node ``name`` has run out. Raise as `fall_silent`."""
        self.fall_silent(name, now)
        self._lost.add(self._number(name))

    def find(self, name: str) -> int:
        """Note that node ``name`` answers again. Return its number. Raise as `fall_silent`."""
        number = self._number(name)
        self._silent.pop(number, None)
        self._lost.discard(number)
        self._change_cluster()
        return number

    def grow(self, devices: Sequence[DeviceName]) -> None:
        """Have further devices at the end: ``devices`` are all. There is one node."""
        self.whole = _cluster(devices, self._sockets)
        self._change_cluster()

    def pause(self, devices: Collection[int]) -> None:
        """Set the devices that no job may have, whatever their node does."""
        self._paused = frozenset(devices)
        self._change_cluster()

    def _change_cluster(self) -> None:
        self.cluster = self.whole.without(self._silent, self._paused)

    def numbered(self, reasons: Mapping[str, str]) -> dict[int, str]:
        """Return ``reasons``, which are by name, by the numbers of the nodes. Raise as `fall_silent`."""
        return {self._number(name): reason for name, reason in reasons.items()}

    def _number(self, name: str) -> int:
        if name not in self._names:
            raise UsageError(f"there is no node {name!r}", "start the scheduler anew to have it")
        return self._names.index(name)

    def of(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Return the node of each of ``devices``."""
        return tuple(self.whole.node_of[device] for device in devices)

    def any_silent(self, nodes: Sequence[int]) -> bool:
        """Return True if one of ``nodes`` does not answer."""
        return not self._silent.keys().isdisjoint(nodes)

    def all_lost(self, nodes: Sequence[int]) -> bool:
        """Return True if the lease of each of ``nodes`` has run out."""
        return self._lost.issuperset(nodes)

    def check_usable(self, devices: Sequence[int]) -> None:
        """Raise ``UsageError`` if one of ``devices`` is on a node that does not answer."""
        if self.any_silent(self.of(devices)):
            names = ", ".join(sorted(self.silent))
            raise UsageError(
                f"nothing is heard of node {names}", "name devices of other nodes, or wait for it"
            )

    def in_order(self, devices: Sequence[int], *, as_named: bool = False) -> Sequence[int]:
        """Return ``devices`` node by node, since launchers number the ranks of each node in a row.

        The nodes are in their own order, or in the one in which ``devices`` name them. On each node devices
        stay in their order: a state may be able to come back only to its own device.
        """
        if self.single:
            return devices
        nodes = self.of(devices) if as_named else self.numbers
        return sorted(devices, key=lambda device: nodes.index(self.whole.node_of[device]))

    # Where the processes and the state of a job are.

    def misplaced(self, job: Gang) -> bool:
        """Return True if ``job`` is to have devices of nodes where it has no processes."""
        return not self.single and self.of(job.wanted) != nodes_of_ranks(job, len(job.wanted))

    def cut_off(self, job: Gang) -> bool:
        """Return True if ``job`` has processes on a node that does not answer."""
        return bool(self._silent) and not job.processes_gone and self.any_silent(job.nodes)

    def awaited(self, job: Gang) -> tuple[int, ...]:
        """Return the nodes that do not answer and that ``job`` cannot go on without.

        These have its processes, or its state while it has no process. They do not count any more once the
        job was told to go on without them.
        """
        if not self._silent or job.state.ended:
            return ()
        if job.command.stage is Stage.STARTED:
            needed = job.nodes
        else:
            needed = () if job.spec.relaunch else self.state_nodes(job)[: job.keepers]
        return tuple(sorted(self._silent.keys() & set(needed) - set(job.relocation.without)))

    def waits_until_s(self, job: Gang) -> float:
        """Return until when ``job`` waits for the nodes that it needs; infinite if it waits for none."""
        since_s = [self._silent[node] for node in self.awaited(job)]
        patience_s = job.spec.wait_for_node_s if job.may_have_begun(min(since_s, default=0.0)) else 0.0
        return min(since_s) + patience_s if since_s else inf

    def state_nodes(self, job: Gang) -> tuple[int, ...]:
        """Return the node of each rank's newest state, even if another number of ranks left it."""
        return job.state_nodes[:1] * len(job.ranks) if job.spec.elastic else job.state_nodes

    def origin(self, job: Gang) -> tuple[str, ...]:
        """Return the node where the state of each rank that keeps some is; empty if its process is there.

        Return nothing for a command that is started anew for other devices: it keeps its own state.
        """
        if job.spec.relaunch:
            return ()
        state = self.state_nodes(job)[: job.keepers]
        return self.named(state) if state != job.nodes[: len(state)] else ()

    def can_leave(self, job: Gang) -> bool:
        """Return True if ``job``, which is parked, can go on elsewhere: with no state, or one to be sent.

        The scheduler does not know the checkpoints of a command that is started anew for other devices. They
        count as being where it trained, unless that node does not answer.
        """
        if job.spec.relaunch:
            return not job.state_nodes or self.any_silent(job.state_nodes)
        return not job.relocation.stays and (not job.width or job.portable)

    def may_start_ahead(self, job: Gang) -> bool:
        """Return True if a process of ``job`` may be started on another node before its state is there."""
        alone = len(job.ranks) == 1 and not job.spec.elastic and not job.spec.relaunch
        return self._starts_ahead and not self.single and alone and bool(job.state_nodes)

    def on_its_way(self, job: Gang) -> bool:
        """Return True if processes of ``job`` are started on another node, and none has greeted yet."""
        if job.processes.first_hello_s is not None or job.relocating or job.state.ended:
            return False
        return job.relocation.gone_s is not None or (job.command.runs and bool(self.origin(job)))

    def fitting(self, job: Gang) -> tuple[int, ...]:
        """Return the nodes on which ``job`` can be started and that have room for its state.

        The node of its state always has.
        """
        crowded = job.relocation.no_room.keys() - set(job.state_nodes)
        return tuple(node for node in self._starting(job) if node not in crowded)

    def _starting(self, job: Gang) -> tuple[int, ...]:
        """Return the nodes on which the command of ``job`` can be started, as far as is known."""
        return tuple(node for node in self.numbers if node not in job.command.not_for)

    def has_room(self, job: Gang) -> bool:
        """Return True if the nodes on which ``job`` can be started have enough devices for it."""
        sizes = [self.whole.node_sizes[node] for node in self._starting(job)]
        return job.least <= (max(sizes, default=0) if job.spec.elastic else sum(sizes))

    def restrict(self, job: Gang) -> None:
        """Tell policies to keep ``job`` on any one node if it is elastic, or not all nodes are fit for it.

        A job that needs several of the nodes that are fit, or is on several, may have any.
        """
        if self.single:
            return
        fitting, sizes = self.fitting(job), self.whole.node_sizes
        if not job.spec.elastic:  # it may have any nodes if all are fit, or if one alone is too small
            limited = (job.command.not_for or job.relocation.no_room) and not self._is_spread(job)
            fitting = tuple(node for node in fitting if limited and sizes[node] >= job.least)
        job.within = fitting

    def _is_spread(self, job: Gang) -> bool:
        """Return True if ``job`` is on several nodes with its state or devices, or is to be."""
        nodes = [self.of(devices) for devices in (job.lease, job.borrowed, job.requested_devices)]
        if job.state_nodes:  # else it may be given others before it begins
            nodes += [job.state_nodes, job.nodes, self.of(job.placement)]
        return any(len(set(found)) > 1 for found in nodes)

    def confine(self, job: Gang) -> None:
        """Tell policies whether ``job``, if it must be on one node, must stay on its present node."""
        if job.within and (job.spec.relaunch or not job.lease):
            if self.can_leave(job) and not job.bound:
                self.restrict(job)
            else:
                job.within = job.nodes[:1]


def nodes_of_ranks(job: Gang, count: int) -> tuple[int, ...]:
    """Return the nodes of the first ``count`` ranks of ``job``; of an elastic job all one node."""
    return job.nodes[:1] * count if job.spec.elastic else job.nodes[:count]


def listed(names: Sequence[str]) -> str:
    """Return ``names``, of nodes, joined by commas, each once. The scheduler's own node is ``here``."""
    return ",".join(name or "here" for name in dict.fromkeys(names))


def _cluster(devices: Sequence[DeviceName], sockets: int) -> Cluster:
    """Return the cluster of the nodes that ``devices``, listed node by node, belong to."""
    sizes = [len(list(run)) for _, run in groupby(devices, key=lambda device: device.node)]
    nodes = [Cluster.one_node(size, sockets) for size in sizes or [0]]
    return Cluster(sizes, socket_sizes=[size for node in nodes for size in node.socket_sizes])
