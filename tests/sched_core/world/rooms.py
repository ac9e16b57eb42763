"""Room for states in a world: a node takes so many bytes, and the core is told where there is no room."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuslice.daemon.node_reports import NodeReports
from gpuslice.errors import RamDiskFullError
from gpuslice.nodes.plan import Found
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.lifecycle.events import Moved
from gpuslice.sched_core.live.copies import Copies

from .draws import Draws
from .loop import Loop
from .scenario import CALM_S, Room, Scenario
from .states import STATE_BYTES, States

if TYPE_CHECKING:
    from .world import World

#: How often is looked at the room, as the daemon does.
_LOOK_S = 1.0
#: A place that nobody can use is free again after so many looks.
_LOOKS = 3


def with_rooms(scenario: Scenario) -> Scenario:
    """Return ``scenario`` on nodes with little room, which changes, and stays as it is in the end."""
    draws, found = Draws(scenario.seed), list[Room]()
    for node in scenario.nodes:
        for number in range(draws.number(1, 4, "rooms", node)):
            key = ("room", node, number)
            when_s = draws.between(0.0, CALM_S, *key, "when") if number else 0.0
            found.append(Room(when_s, node, STATE_BYTES * draws.choice([0, 0, 1, 2, 4], *key)))
    return replace(scenario, rooms=tuple(sorted(found, key=lambda room: room.when_s)))


class Rooms:
    """How many bytes are left on each node, by the states that really lie there."""

    def __init__(self, scenario: Scenario, loop: Loop, states: States) -> None:
        self._scenario, self._loop, self._states = scenario, loop, states

    def left_bytes(self, node: str) -> int | None:
        """Return the free room on ``node``; None if it has no end."""
        now_s = self._loop.now_s
        here = [room for room in self._scenario.rooms if room.node == node and room.when_s <= now_s]
        return max(0, here[-1].nbytes - self._states.bytes_on(node)) if here else None

    def takes(self, sources: tuple[str, ...], targets: tuple[str, ...]) -> bool:
        """Return True if there is room for each rank's state on its target."""
        needs = Counter(target for source, target in zip(sources, targets, strict=True) if source != target)
        left = {node: self.left_bytes(node) for node in needs}
        return all(room is None or room >= STATE_BYTES * needs[node] for node, room in left.items())


class _Reports(NodeReports):
    """Today's reports of nodes, which have the rooms of a world."""

    def __init__(self, rooms: Rooms, nodes: tuple[str, ...]) -> None:
        super().__init__([Found(name, "", "", "") for name in nodes])
        self._rooms = rooms

    def _room_bytes(self, name: str) -> int | None:
        return self._rooms.left_bytes(name)


class RoomWatch:
    """Tells the core once a second which nodes have no room, and sees what it makes of that.

    Parameters
    ----------
    world
        The world.
    """

    def __init__(self, world: World) -> None:
        self._world, self._ground = world, world.ground
        self._reports = _Reports(world.ground.rooms, world.scenario.nodes)
        self._idle: Counter[str] = Counter()

    def begin(self) -> None:
        """Look from now on, if the world has little room."""
        if self._world.scenario.rooms:
            self._ground.loop.after(_LOOK_S, self._look)

    def _look(self) -> None:
        if self._world.serves:
            core = self._world.now.core
            for job in core.jobs.values():
                if job.state.ended and job.processes_gone:
                    self._ground.states.forget(job.id)
            for change in self._reports.changes_of_room(core, Copies(core)):
                self._ground.record.note(change.job, 0, "no room", sorted(change.nodes))
                self._world.now.handle(change)
            self._see()
        self._ground.loop.after(_LOOK_S, self._look)

    def admits(self, request: Moved) -> bool:
        """Return True if the daemon does not refuse ``request`` for want of room."""
        core = self._world.now.core
        with suppress(RamDiskFullError):
            self._reports.admit_move(core, Copies(core), request)
            return True
        return False

    def _see(self) -> None:
        """See that nobody keeps a place, by the plan, on a node where its state has no room."""
        core = self._world.now.core
        keeps = {
            job.id
            for job in core.jobs.values()
            if job.running and not (job.state.ended or job.lease or job.relocating or job.requested_devices)
            if self._is_crowded(job)
        }
        self._idle = Counter({name: self._idle[name] + 1 for name in keeps})
        for name, looks in self._idle.items():
            if looks > _LOOKS:
                raise self._ground.record.violated("a place is idle on a node without room", name)

    def _is_crowded(self, job: Gang) -> bool:
        nodes = self._world.now.core.state.nodes
        crowded = job.relocation.no_room.keys() - set(job.state_nodes)
        return nodes.misplaced(job) and not crowded.isdisjoint(nodes.of(job.placement))
