"""Commands of jobs: what starts the ranks, ends the others when one fails, and how a whole attempt goes."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING

from .ground import Ground
from .ranks import RankProcess
from .scenario import JobPlan

if TYPE_CHECKING:
    from .nodes import Machine
    from .safety import Safety

START_S, END_S, REAP_S = 0.2, 0.2, 0.05
#: How a script ends that fails by itself: exit code, and what it has written.
FAILURES = ((1, "ValueError: no"), (1, "MemoryError"), (-11, ""), (1, "NCCL watchdog"))


class LockStep:
    """The collectives of a gang: a step is made when all who train are ready for it."""

    def __init__(self, ground: Ground, key: tuple[object, ...], step_s: float) -> None:
        self._ground, self._key, self._step_s = ground, key, step_s
        self._ready: dict[int, RankProcess] = {}

    def ready(self, rank: RankProcess) -> None:
        """``rank`` waits for the others in its next step."""
        self._ready[rank.rank] = rank
        width = rank.width or rank.command.run.ranks
        group = [one for number in range(width) if (one := self._ready.get(number)) is not None]
        if len(group) < width or len({(one.width, one.world) for one in group}) > 1:
            return
        newest = max(one.boundaries.count for one in group)
        for one in group:
            del self._ready[one.rank]
            if newest >= one.plan.boundaries:
                one.end_well()
            else:
                faults, key = self._ground.scenario.faults, (*one.key, newest, "skew")
                skew = self._ground.draws.between(0.0, 0.1, *key) if faults else 0.0
                self._ground.loop.after(self._step_s * (1.0 + skew), lambda one=one: one.cross(newest + 1))

    def gone(self, rank: RankProcess) -> None:
        """``rank`` has ended."""
        if self._ready.get(rank.rank) is rank:
            del self._ready[rank.rank]


class Run:
    """One attempt of a job, on all of its nodes.

    Attributes
    ----------
    ranks
        How many there are.
    start
        The boundary from which it goes on.
    failed, absent
        Whether it failed by itself, and whether a node of it did not answer.
    harmed
        Whether something went wrong, so that nobody can say where the next attempt begins.
    newest
        The newest boundary that a rank has passed.
    """

    def __init__(self, ground: Ground, safety: Safety, plan: JobPlan, attempt: int, ranks: int) -> None:
        self.ground, self.safety, self.plan, self.ranks = ground, safety, plan, ranks
        self.job, self.attempt = plan.spec.id, attempt
        self.lockstep = LockStep(ground, (self.job, attempt), plan.step_s)
        self.commands: dict[int, Command] = {}
        self.start = self.newest = 0
        self.harmed = self.failed = self.absent = False

    def join(self, command: Command, place: int, places: int, count: int) -> None:
        """A launcher has started its part; once all have, so do the ranks."""
        self.commands[place] = command
        command.count = count
        if len(self.commands) < places:
            return
        number, nodes = 0, dict[int, str]()
        for _, one in sorted(self.commands.items()):
            one.numbers = tuple(range(number, number + one.count))
            nodes |= dict.fromkeys(one.numbers, one.machine.name)
            number += one.count
        keepers = {0: nodes[0]} if self.plan.spec.elastic else nodes
        self.start = self.newest = self.ground.states.common(self.job, keepers)
        self.safety.begins(self)
        absent = {number for one in self.commands.values() for number in one.numbers if one.misses(number)}
        if len(absent) == self.ranks:
            absent.remove(0)  # a command that nobody greets for may be no training: it has no time limit
        for _, one in sorted(self.commands.items()):
            one.spawn(absent)

    def commands_on(self, node: str) -> list[Command]:
        """Return the commands on ``node`` that run."""
        return [one for one in self.commands.values() if one.machine.name == node and one.code is None]

    def fails_at(self, rank: RankProcess) -> bool:
        """See whether the script of ``rank`` fails where it is, by itself."""
        draws, key = self.ground.draws, (self.job, self.attempt)
        if not self.ground.fault(0.12, *key, "fails") or rank.rank != draws.number(
            0, self.ranks - 1, *key, "who"
        ):
            return False
        if rank.boundaries.count != self.start + draws.number(1, self.plan.boundaries, *key, "where"):
            return False
        rank.die(*draws.choice(FAILURES, *key, "how"))
        return True


class Command:
    """The command of one attempt on one node, below its supervisor.

    Attributes
    ----------
    code
        How it has ended; ``None`` before.
    watched
        Whether a scheduler has heard of one of its ranks.
    frozen
        Whether all of it is stopped, because the node's lease is over.
    told_to_end
        Whether its node was told to end it.
    """

    def __init__(
        self, ground: Ground, machine: Machine, run: Run, environ: Mapping[str, str], pids: Callable[[], int]
    ) -> None:
        self.ground, self.machine, self.run = ground, machine, run
        self.job, self.attempt, self.plan = run.job, run.attempt, run.plan
        self.code: int | None = None
        self.said = ""
        self.frozen = self.watched = False
        self.leased = "GPUSLICE_LEASED" in environ
        self.numbers: tuple[int, ...] = ()
        self.count = 0
        self.processes: dict[int, RankProcess] = {}
        self._environ, self._pids = environ, pids
        self._training = 0
        self._failed = 0
        self.told_to_end = False
        self.key = (self.job, self.attempt, machine.name)

    def begin(self) -> None:
        """Start; the ranks follow when the launchers of all nodes have met."""
        if self.ground.fault(0.04, *self.key, "cannot start"):
            self.run.harmed = self.run.failed = True
            self.ground.loop.after(START_S, lambda: self._end(1, "MemoryError"))
            return
        self.ground.loop.after(self.ground.lasts_s(START_S, *self.key, "start"), self._meet)

    def _meet(self) -> None:
        if self.frozen:
            self.ground.loop.after(1.0, self._meet)
        elif self.code is None:
            total = int(self._environ["RANKS"])
            place, places = (
                int(self._environ.get("PET_NODE_RANK", 0)),
                int(self._environ.get("PET_NNODES", 1)),
            )
            self.run.join(self, place, places, int(self._environ.get("PET_NPROC_PER_NODE", total)))

    def misses(self, number: int) -> bool:
        """See whether rank ``number`` never comes."""
        limited = self.run.ranks > 1 and self.plan.spec.boundary_timeout_s > 0  # else it may wait for ever
        return limited and self.ground.fault(0.02, *self.key, number, "never comes")

    def spawn(self, absent: Container[int]) -> None:
        """Start the ranks of this node but those that are ``absent``."""
        if self.code is not None:
            return
        for number in self.numbers:
            if number in absent:
                self.run.harmed = self.run.failed = True
            else:
                self._start(number)

    def _start(self, number: int) -> None:
        process = RankProcess(self.ground, self, number, self._pids(), self._training)
        self.processes[number] = process
        self.machine.ranks[process.pid] = process
        self.run.safety.started(process)
        process.begin()

    def exited(self, process: RankProcess, code: int, said: str) -> None:
        """One of its ranks has ended."""
        if self.code is not None:
            return
        if code:
            self.run.harmed = self.run.harmed or not self.told_to_end
            self.run.failed = self.run.failed or not self.told_to_end
            self.ground.loop.after(REAP_S, lambda: self._fail(code, said))
        elif not any(one.alive for one in self.processes.values()) and not self._failed:
            self._training += 1
            if self._training < self.plan.trainings and not self.told_to_end:
                self.ground.loop.after(START_S, lambda: self._again(process.rank))
            else:
                self.ground.loop.after(REAP_S, lambda: self._end(0))

    def _again(self, number: int) -> None:
        if self.code is None and not self.told_to_end:
            self.run.start = 0
            self._start(number)

    def _fail(self, code: int, said: str) -> None:
        self._failed = code
        self._kill_ranks()
        self._end(code if self.run.ranks == 1 else 1, said)

    def end(self, grace_s: float) -> None:
        """End all of it, as its node was told to: asked, if there is grace."""
        if self.code is not None:
            return
        self.told_to_end = True
        self.run.safety.told_to_end(self)
        if not grace_s:
            self.kill()
            return
        stubborn = self.ground.fault(0.1, *self.key, "stubborn") and not self.plan.spec.relaunch
        saves = self.plan.spec.relaunch and self.ground.scenario.faults
        takes_s = self.ground.draws.between(END_S, 0.8 * grace_s, *self.key, "saves") if saves else END_S
        self.ground.loop.after(grace_s if stubborn else min(takes_s, grace_s), self._leave)

    def _leave(self) -> None:
        """End as SIGTERM asks it to; a script with checkpoints of its own has saved one."""
        if self.code is not None:
            return
        if self.frozen:
            self.ground.loop.after(1.0, self._leave)
            return
        if self.plan.spec.relaunch and (first := self.processes.get(0)) is not None and first.alive:
            self.ground.states.publish(self.job, 0, self.machine.name, self.run.newest)
        self._kill_ranks()
        self._end(-15)

    def kill(self) -> None:
        """End all of it, unasked."""
        self._kill_ranks()
        self._end(-9)

    def vanish(self) -> None:
        """Be gone with the machine."""
        self.run.harmed = True
        for process in self.processes.values():
            process.alive, process.device = False, None
            self.run.lockstep.gone(process)
        self.code = -9 if self.code is None else self.code

    def thaw(self) -> None:
        """Go on after a stop."""
        self.frozen = False
        for process in list(self.processes.values()):
            process.thaw()

    def _kill_ranks(self) -> None:
        self._failed = self._failed or -9
        for process in list(self.processes.values()):
            process.die(-9)

    def _end(self, code: int, said: str = "") -> None:
        if self.code is None:
            self.code, self.said = code, said
            self.ground.record.note(self.job, self.attempt, "command ended", code)
            self.machine.command_ended(self)
