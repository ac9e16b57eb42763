"""A machine that is switched off with all of its jobs kept: ``down --keep``, an empty RAM disk, ``up``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from gpuslice.errors import GpusliceError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.lifecycle.events import Event
from gpuslice.sched_core.live.keeping import Keeping
from gpuslice.sched_core.live.scheduler import Scheduler as LiveScheduler

from .states import Kept as Snapshots

if TYPE_CHECKING:
    from .schedulers import Scheduler
    from .world import World

#: How often it is looked whether all jobs have come to rest, and how often keeping them is tried.
_LOOK_S = 1.0
_TRIES = 40
_AGAIN_S = 30.0


class _Shown:
    """The part of the scheduler that ``Keeping`` calls."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def core(self) -> Core:
        return self._world.now.core

    def now(self) -> float:
        return self._world.ground.loop.now_s

    def apply_request(self, event: Event) -> None:
        self._world.now.handle(event)

    def register(self, descriptor: int, act: Callable[[], object]) -> None:
        """Do nothing: it is looked again and again."""


class Disk:
    """Where the snapshots of the jobs are while the machine is off: what ``Keeping`` calls a shelf."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.snapshots: Snapshots = {}

    def check(self) -> None:
        """There is room for everything."""

    def store(self, kept: dict[str, int]) -> None:
        """Write all snapshots of these jobs to the disk."""
        states = self._world.ground.states
        self.snapshots = {}
        for plan in self._world.scenario.jobs:
            if plan.spec.relaunch:  # its checkpoints are its own, on a disk
                self.snapshots |= states.of(plan.spec.id)
        for job in kept:
            self.snapshots |= states.of(job)

    def note(self, jobs: object) -> None:
        """Write down nothing: the next scheduler has the journal."""

    def begin(self) -> None:
        """Do nothing: nothing was written down."""


class Reboot:
    """One reboot, by the code of the live scheduler.

    Parameters
    ----------
    world
        The world. It has one node.
    away_s
        How long the machine is off.
    end, begin
        End the scheduler, and begin another one.
    """

    def __init__(
        self, world: World, away_s: float, end: Callable[[], object], begin: Callable[[], object]
    ) -> None:
        self._world, self._away_s, self._end, self._begin = world, away_s, end, begin
        self._tries = 0
        self._scheduler: Scheduler | None = None
        self._disk = Disk(world)

    def begin(self) -> None:
        """Park all jobs, end their processes, and switch the machine off once that is done."""
        world, self._tries = self._world, self._tries + 1
        world.ground.record.note("", 0, "the machine is to be switched off")
        world.keeping, self._scheduler = True, world.scheduler
        keeping = Keeping(cast(LiveScheduler, _Shown(world)), cast(Any, self._disk))
        keeping.begin(self._refused)
        self._advance(keeping)

    def _advance(self, keeping: Keeping) -> None:
        world = self._world
        if world.keeping and world.scheduler is not self._scheduler:
            world.keeping = False  # the scheduler has died: the next one lets all go on
            self._again()
        done = world.keeping and keeping.advance()
        if (moving := keeping._storing) is not None:
            moving.join()
        if world.keeping and not done:
            world.ground.loop.after(_LOOK_S, lambda: self._advance(keeping))
            return
        keeping.close()
        if done:
            self._switch_off()

    def _refused(self, error: GpusliceError) -> None:
        """All jobs go on: try again later."""
        self._world.keeping = False
        self._world.ground.record.note("", 0, "not switched off", error.message)
        self._again()

    def _again(self) -> None:
        if self._tries >= _TRIES:
            raise self._world.ground.record.violated("the machine cannot be switched off")
        self._world.ground.loop.after(_AGAIN_S, self._world.people.when_served(self.begin))

    def _switch_off(self) -> None:
        world = self._world
        self._end()
        if left := world.safety.left_over():
            raise world.ground.record.violated("processes are left when the machine goes off", *left)
        world.ground.record.note("", 0, "the machine is off")
        world.ground.states.lose("")
        world.ground.loop.after(self._away_s, self._switch_on)

    def _switch_on(self) -> None:
        world = self._world
        world.ground.states.put(self._disk.snapshots)
        world.keeping = False
        self._begin()
        world.ground.record.note("", 0, "the machine is on")
