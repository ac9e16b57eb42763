"""What is known of each node, for people: what its agent says that it has, and why it is left out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from gpuslice import config
from gpuslice.errors import RamDiskFullError
from gpuslice.node_agents import preflight
from gpuslice.nodes.device_users import Users
from gpuslice.nodes.plan import Found, Remark
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.lifecycle.events import Moved, NoRoom, Noted
from gpuslice.sched_core.live.copies import Copies
from gpuslice.sched_core.nodes.remote_nodes import COME_S, RemoteNode, RemoteNodes
from gpuslice.verbs import NodeInfo

#: What the scheduler's own node is called.
HERE = "here"


class Reading(NamedTuple):
    """What is known of one node at a moment: see ``NodeInfo``."""

    node: str
    heard_s: float | None
    ramdisk_free_bytes: int | None
    clock_s: float | None


def noted(remark: Remark) -> Noted:
    """Return the event that tells of ``remark``."""
    what = "node_left_out" if remark.left_out else "node_remark"
    details = {"node": remark.node or HERE, "reason": remark.reason, "remedy": remark.remedy}
    return Noted(what, "", details)


class NodeReports:
    """The reports of all nodes, and the judgement of those that join.

    Parameters
    ----------
    nodes
        Those that the scheduler uses, its own first; empty: there is only that.
    working_directory
        Where jobs are likely to be submitted.
    remarks
        What the preflight found, of nodes that are left out, too.

    Attributes
    ----------
    note
        Called with each event that people should know.
    used
        Called with a node and who else uses its devices, whenever its agent tells.
    own_spills
        True if snapshots of parked jobs go to a disk here when the RAM disk is full.
    """

    def __init__(
        self, nodes: Sequence[Found] = (), working_directory: str = "", remarks: Iterable[Remark] = ()
    ) -> None:
        self.note: Callable[[Noted], object] = lambda note: None
        self.used: Callable[[str, Users], object] = lambda node, users: None
        self.own_spills = False
        self._nodes = [node.name for node in nodes] or [""]
        self._directory = working_directory
        self._here = preflight.PresentFacts((), working_directory)
        self._facts: dict[str, preflight.Facts] = {}
        self._clocks_s: dict[str, float] = {}
        self._remarks: dict[str, list[Remark]] = {}
        #: Why no agent could be started on a node that is silent; written by another thread.
        self._missed: dict[str, Remark | None] = {}
        self.add(remarks)

    def add(self, remarks: Iterable[Remark]) -> None:
        """Keep ``remarks``, which people have been told."""
        for one in remarks:
            self._remarks.setdefault(one.node, []).append(one)

    def judge(self, name: str, written: bytes, joins: bool) -> str:
        """Take what the agent of node ``name`` says that it has. Return why the node cannot be used.

        Only an agent that ``joins`` is judged. An agent that says nothing fits.
        """
        if not written:
            return ""
        try:
            facts = msgspec.json.decode(written, type=preflight.Facts)
        except msgspec.DecodeError as error:
            remedy = "install the same gpuslice there, and start the scheduler again"
            found = [Remark(name, f"its gpuslice answers as another version does: {error}", remedy)]
        else:
            self._facts[name], self._clocks_s[name] = facts, facts.unix_s - time.time()
            self.used(name, facts.users)
            if not joins:
                return ""
            found = preflight.compare(name, self._here.now(), facts, self._directory, self._clocks_s[name])
        self._replace(name, found)
        return next((one.reason for one in found if one.left_out), "")

    def absent(self, name: str) -> None:
        """Tell that the agent of node ``name`` was started and has not come."""
        remedy = (
            "its log there says why; let TCP through to the scheduler's port for agents, which --agent-port "
            "pins"
        )
        self._replace(name, [Remark(name, f"its agent has not come within {COME_S:g} s", remedy)])

    def missed(self, name: str, remark: Remark | None) -> None:
        """Note why no agent can be started on node ``name``, which is silent; None: one runs there."""
        self._missed[name] = remark

    def admit_move(self, core: Core, copies: Copies, request: Moved) -> None:
        """Check that the nodes of ``request`` have room for the state of its job, as far as that is known.

        Raises
        ------
        RamDiskFullError
            If one has not. The job stays.
        """
        job, nodes = core.jobs[request.job], core.state.nodes
        there = {str(device): device.node for device in core.devices}
        needs: Counter[str] = Counter()
        for rank, home in enumerate(nodes.named(nodes.state_nodes(job)[: job.keepers])):
            goal = there.get(request.devices[rank], home) if rank < len(request.devices) else home
            if goal != home:  # a state whose size is not known has a byte at least
                needs[goal] += core.state.switch_costs.rank_bytes(job, rank) or 1
        copy = copies.newest(job)
        for name, nbytes in needs.items():
            room_bytes = self._room_bytes(name)
            has_copy = copy is not None and (name or HERE) in copy.targets.split(",")
            if room_bytes is not None and room_bytes < nbytes and not has_copy:
                free = config.format_size(room_bytes)
                raise RamDiskFullError(
                    f"node {name or HERE} has {free} left in its RAM disk, and the state of {job.id} needs "
                    + (config.format_size(nbytes) if nbytes > 1 else "more"),
                    "the job stays; `gpuslice ramdisk gc --all` there removes what jobs have left",
                )

    def changes_of_room(self, core: Core, copies: Copies) -> list[NoRoom]:
        """Return what the core does not know yet: which nodes have no room for the state of a job.

        Nothing is said of a job whose state is on its way, or whose size is not known.
        """
        if core.state.nodes.single:
            return []
        rooms = {name: self._room_bytes(name) for name in self._nodes}
        jobs = [job for job in core.jobs.values() if not job.state.ended]
        found = (self._change_of_room(core, copies, job, rooms) for job in jobs)
        return [change for change in found if change is not None]

    def _change_of_room(
        self, core: Core, copies: Copies, job: Gang, rooms: Mapping[str, int | None]
    ) -> NoRoom | None:
        nodes = core.state.nodes
        states = nodes.state_nodes(job)[: job.keepers]
        needs = _needs_bytes(core, job, len(states))
        if not any(needs) or job.relocating or job.nodes[: len(states)] != states:
            return None
        known, copy = nodes.named(tuple(job.relocation.no_room)), copies.newest(job)
        has = {*nodes.named(states), *(copy.targets.replace(HERE, "").split(",") if copy else ())}
        places = Counter(device.node for device in core.devices)
        reasons = {}
        for name, room_bytes in rooms.items():
            nbytes = sum(needs[: places[name]])  # all ranks may come to that node
            wanted_bytes = nbytes + (nbytes // 10 if name in known else 0)  # or it would change all the time
            if room_bytes is not None and room_bytes < wanted_bytes and name not in has:
                reasons[name] = (
                    f"{config.format_size(room_bytes)} left in its RAM disk, and its state needs "
                    f"{config.format_size(nbytes)}"
                )
        return NoRoom(job.id, reasons) if reasons.keys() != set(known) else None

    def _room_bytes(self, name: str) -> int | None:
        """Return the free room in the RAM disk of node ``name``. None if that is not known, or can grow."""
        facts = self._facts.get(name) if name else self._here.now()
        if facts is None or facts.spills or not facts.ramdisk or (self.own_spills and not name):
            return None
        return facts.ramdisk_bytes

    def nodes(self, core: Core, remote: RemoteNodes | None) -> tuple[NodeInfo, ...]:
        """Return all nodes, those included that were left out, with what is known of them now."""
        others = {} if remote is None else remote.nodes
        names = list(dict.fromkeys([*self._nodes, *self._remarks]))
        return tuple(self._info(name, core, others.get(name), remote) for name in names)

    def _info(self, name: str, core: Core, node: RemoteNode | None, remote: RemoteNodes | None) -> NodeInfo:
        facts = self._here.now() if not name else self._facts.get(name)
        silent_s = None if node is None or remote is None else remote.silent_s(node)
        state, said = _state(name, node, core.state.nodes.lost), self._remarks.get(name, [])
        if (missed := self._missed.get(name)) and state != "up":
            said = [*(one for one in said if _gist(one) != _gist(missed)), missed]
        return NodeInfo(
            name=name or HERE,
            devices=tuple(str(device) for device in core.devices if device.node == name),
            state=state,
            jobs=_jobs_on(core, name),
            heard_s=silent_s if node is None or node.came else None,
            version=None if facts is None else facts.gpuslice,
            ramdisk_free_bytes=None if facts is None else facts.ramdisk_bytes,
            clock_s=self._clocks_s.get(name),
            reason="; ".join(one.reason for one in said),
            remedy="; ".join(one.remedy for one in said if one.remedy),
        )

    def readings(self, remote: RemoteNodes | None) -> list[Reading]:
        """Return what is known of each node that is used, for another thread: nothing of the core is read."""
        others = {} if remote is None else remote.nodes
        found = []
        for name in self._nodes:
            facts = self._facts.get(name) if name else self._here.now()
            node = others.get(name)
            heard_s = remote.silent_s(node) if remote is not None and node is not None and node.came else None
            nbytes = None if facts is None else facts.ramdisk_bytes
            found.append(Reading(name or HERE, heard_s, nbytes, self._clocks_s.get(name)))
        return found

    def _replace(self, name: str, found: list[Remark]) -> None:
        """Keep what was ``found`` of a node instead of what was before; tell what is new."""
        before = {_gist(one) for one in self._remarks.pop(name, [])}
        if found:
            self._remarks[name] = found
        for one in found:
            if _gist(one) not in before:
                self.note(noted(one))


def _needs_bytes(core: Core, job: Gang, ranks: int) -> list[int]:
    """Return the bytes of the state of each of the first ``ranks`` ranks of ``job``, the largest first.

    Of new processes nothing is known. Of a state that was to be brought elsewhere the whole size is.
    """
    found = [core.state.switch_costs.rank_bytes(job, rank) for rank in range(ranks)]
    if not any(found):
        found = [-(-job.relocation.state_bytes // max(1, ranks))] * ranks
    return sorted(found, reverse=True)


def _state(name: str, node: RemoteNode | None, lost: frozenset[str]) -> str:
    """Return in a word how node ``name`` stands; ``node`` is None if it is not used, or this one."""
    if not name:
        return "up"
    if node is None or node.misfit:
        return "left out"
    if name in lost:
        return "lost" if node.came else "left out"
    if not node.came:
        return "starting"
    return "silent" if node.silent else "up"


def _gist(remark: Remark) -> tuple[bool, str]:
    """Return what makes a remark another one, without the numbers that change all the time."""
    return remark.left_out, "".join(sign for sign in remark.reason if not sign.isdigit())


def _jobs_on(core: Core, name: str) -> tuple[str, ...]:
    """Return the jobs that have processes on node ``name``."""
    nodes = core.state.nodes
    return tuple(
        job.id
        for job in core.jobs.values()
        if not job.processes_gone and name in nodes.named(tuple(set(job.nodes)))
    )
