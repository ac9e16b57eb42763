"""One process of a job: the agent's own orders and boundaries, and a script that trains, parks and dies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuslice import wire
from gpuslice.agent.orders import Orders, Phase
from gpuslice.runtime.boundaries import BoundaryCounter

from .ground import Ground
from .processes import Process
from .states import STATE_BYTES

if TYPE_CHECKING:
    from .launchers import Command

IMPORT_S, SETUP_S, SUSPEND_S = 0.8, 0.6, 0.3
#: Which share of refused resumes is refused for good.
_FOR_GOOD = 0.1
_LINGER_S = 0.1


class RankProcess(Process):
    """A rank, from its start to its end.

    Parameters
    ----------
    ground
        The world.
    command
        Who has started it.
    rank
        Its number.
    pid
        Its process.
    training
        The how many-th training of the command this is.

    Attributes
    ----------
    device
        What it may have something on, with its node's name; ``None``: nothing.
    width, world
        Of an elastic job, who trains with it.
    told_at, late_by
        How many boundaries it had passed when it was told to stop (None: it is not), and how many more when
        an order to stop last came too late.
    went_on_from
        The boundary of the snapshot that it began with.
    """

    def __init__(self, ground: Ground, command: Command, rank: int, pid: int, training: int) -> None:
        self.command, self.rank, self.pid = command, rank, pid
        self.job, self.attempt, self.plan = command.job, command.attempt, command.plan
        super().__init__(ground, command, (self.job, self.attempt, rank, training))
        self.boundaries = BoundaryCounter()
        self.orders = Orders(self.boundaries)
        self.waits, self.profile = False, ground.scenario.profile
        self.device: str | None = None
        self.standing: wire.Suspended | None = None
        self.bye: wire.Bye | None = None
        self.width = self.world = 0
        self.parked_at = 0
        self.told_at: int | None = None
        self.late_by = 0
        self._suspends = self._resumes = 0
        self._imported = False
        self.parked_on: str | None = None
        self._start = command.run.start

    def begin(self) -> None:
        """Import, say Hello and hold still; now and then somebody kills it, or cuts its connection."""
        self.after(self.ground.lasts_s(IMPORT_S, *self.key, "import"), self._hello)
        draws, cuts = self.ground.draws, self.profile.cuts
        if self.ground.fault(0.06, *self.key, "killed"):
            self.ground.unless_calm(draws.between(0.0, 25.0, *self.key, "killed at"), self._killed)
        for number in range(cuts):
            if self.ground.fault(0.2 if cuts == 1 else 0.8, *self.key, "cut", number):
                after_s = draws.between(0.0, 25.0, *self.key, "cut at", number)
                self.ground.unless_calm(after_s, self.lose_connection)

    @property
    def identity(self) -> bytes:
        """What its connection is known by."""
        return f"{self.job}:{self.rank}:{self.pid}".encode()

    @property
    def name(self) -> str:
        return f"{self.job}.{self.attempt}.{self.rank} (process {self.pid})"

    # Messages.

    def connect(self) -> None:
        """Say how things stand: there is a new connection, and what was on its way is lost."""
        self.up.cut()
        self.down.cut()
        self.connected = self.command.machine.serves
        if not self.alive or not self._imported or not self.connected:
            return
        self.say(
            wire.Hello(
                version=wire.PROTOCOL_VERSION,
                job=self.job,
                rank=self.rank,
                world_size=self.command.run.ranks,
                pid=self.pid,
                boundary=self.boundaries.count,
                epoch=self.orders.epoch,
                parked=self.orders.phase is not Phase.RUNNING,
                attempt=self.attempt,
            )
        )
        for said in (self.standing, self.bye):
            if said is not None:
                self.say(said)

    def frame(self, message: wire.FromAgent) -> None:
        self.command.machine.heard(self, wire.encode(message))

    def obey(self, message: wire.ToAgent) -> None:
        answers: list[wire.FromAgent] = []
        match message:
            case wire.Resume():
                if message.epoch > self.orders.epoch:
                    self.told_at = None  # where a former lease was to end is no matter any more
                answers = self.orders.resume(message)
            case wire.Suspend():
                self.command.run.safety.told_to_stop(self, message.stop_at)
                answers = self.orders.suspend(message)
            case wire.Dismiss():
                answers = self.orders.dismiss(message)
            case wire.Withdraw():
                answers = self.orders.withdraw(message, lambda: False)
            case wire.Rejected():
                raise self.ground.record.violated("an honest rank was rejected", self.name, message.error)
            case wire.Welcome() | wire.Queued() | wire.Replaced():
                pass
        for answer in answers:
            self.say(answer)
        if self.waits:
            self._await()

    # The thread that trains.

    def _hello(self) -> None:
        self._imported = self.waits = True
        self.connect()

    def _await(self) -> None:
        """Go on if there is an order, else hold still."""
        self.waits = not self.orders.called
        if self.waits:
            return
        order = self.orders.await_order()
        if isinstance(order, wire.Resume):
            self._come(order)
        else:
            self.end_well()

    def _come(self, order: wire.Resume) -> None:
        number, self._resumes = self._resumes, self._resumes + 1
        self.device = f"{self.command.machine.name}/{order.device}"
        self.command.run.safety.entered(self)
        lasts_s = self.ground.lasts_s(self.profile.resume_s, *self.key, "resume", number) if number else 0.0
        self.after(lasts_s, lambda: self._came(order, number))

    def _came(self, order: wire.Resume, number: int) -> None:
        refuses = self.standing is not None and self._refuses(*self.key, "resume", number)
        elsewhere = self.standing is not None and self.standing.bound and self.device != self.parked_on
        if refuses or elsewhere:
            self.device = None
            for_good = bool(elsewhere) or self.ground.draws.chance(_FOR_GOOD, *self.key, "for good", number)
            if elsewhere:
                raise self.ground.record.violated("a bound job was resumed elsewhere", self.name)
            self.ground.record.note(self.job, self.attempt, "resume refused", self.rank)
            self.command.run.failed = True
            self.command.run.harmed = True
            self.say(self._refused(running=False, retryable=not for_good))
            self._await()
            return
        first, self.standing = self.standing is None, None
        if first:
            self.boundaries.count = self.boundaries.steps = self.boundaries.went_on_from = self._start
        self.width, self.world = order.width, order.world
        self.orders.run_on()
        self.ground.record.note(self.job, self.attempt, "on", (self.rank, order.device))
        self.say(wire.Resumed(epoch=self.orders.epoch, boundary=self.boundaries.count, stages_s={}))
        setup_s = self.ground.lasts_s(SETUP_S, *self.key, "setup") if first else 0.0
        self.after(setup_s, self._train)

    def _refuses(self, *key: object) -> bool:
        return self.ground.fault(self.profile.refuses, *key)

    def _refused(self, *, running: bool, retryable: bool = True) -> wire.Refused:
        return wire.Refused(
            epoch=self.orders.epoch,
            boundary=self.boundaries.count,
            running=running,
            error="no room",
            remedy="",
            retryable=retryable,
        )

    def _train(self) -> None:
        """Make the next step, with the others, unless that was the last."""
        if self.boundaries.count >= self.plan.boundaries and not self.plan.spec.joined:
            self.end_well()
        else:
            self.command.run.lockstep.ready(self)

    def cross(self, boundary: int) -> None:
        """Pass a boundary, or park there."""
        self.do(lambda: self._cross(boundary))

    def _cross(self, boundary: int) -> None:
        self.boundaries.count = self.boundaries.steps = boundary
        self.command.run.newest = max(self.command.run.newest, boundary)
        self.ground.record.passed()
        self.command.run.safety.passed(self)
        if not self.ground.scenario.faults and self.device is not None:
            self.command.run.safety.closed.stays(self, self.plan)
        if self.command.run.fails_at(self):
            return
        if boundary >= self.boundaries.stop_at:
            if not self.plan.odd and boundary % 2:
                if self.command.run.ranks > 1:
                    for answer in self.orders.pass_by(boundary):
                        self.say(answer)
            elif self.orders.arrive(boundary):
                number, self._suspends = self._suspends, self._suspends + 1
                lasts_s = self.ground.lasts_s(SUSPEND_S, *self.key, "suspend", number)
                self.after(lasts_s, lambda: self._parked(boundary, number))
                return
        if not self.ground.scenario.faults or self.ground.draws.chance(0.8, *self.key, "beat", boundary):
            self._beat()
        self._train()

    def _beat(self) -> None:
        count, begun = self.boundaries.count, self.boundaries.went_on_from
        self.say(wire.Progress(epoch=self.orders.epoch, boundary=count, step=count, went_on_from=begun))

    def _parked(self, boundary: int, number: int) -> None:
        if self._refuses(*self.key, "suspend", number):
            self.ground.record.note(self.job, self.attempt, "suspend refused", self.rank)
            self.orders.run_on()
            self.say(self._refused(running=True))
            self._train()
            return
        self.command.run.safety.parked(self, boundary)
        self.parked_on, self.device = self.device, None
        draws, key = self.ground.draws, (self.job, self.attempt, boundary)
        portable = draws.chance(self.plan.portable, *key, "portable") and self.plan.trainings == 1
        # Where the others of an elastic job were is not remembered for as long as fewer train.
        keeps = not self.plan.spec.joined or self.rank == 0
        bound = keeps and draws.chance(self.plan.bound, *key, "bound")
        self.standing = wire.Suspended(
            epoch=self.orders.epoch,
            boundary=boundary,
            step=boundary,
            nbytes=STATE_BYTES,
            stages_s={},
            bound="a library" if bound else "",
            restartable=portable,
            restartable_later=self.plan.portable > 0.0,
        )
        if portable and not self.plan.spec.relaunch:  # its checkpoints are its own
            self.ground.states.publish(self.job, self.rank, self.command.machine.name, boundary)
        self.ground.record.note(self.job, self.attempt, "parked", (self.rank, boundary))
        self.say(self.standing)
        self._await()

    def end_well(self) -> None:
        """Say Bye, and end."""
        count = self.boundaries.count
        self.bye = wire.Bye(epoch=self.orders.epoch, boundary=count, step=count)
        self.say(self.bye)
        self.orders.released = True  # it is asked for nothing more
        self.waits = False
        self.after(self.ground.lasts_s(self.profile.exit_s, *self.key, "exit"), self._exit)

    def _exit(self) -> None:
        """End when the last words are on their way, if there is somebody to hear them."""
        if self.connected or not self.command.machine.serves:
            self.die(0)
        else:
            self.after(_LINGER_S, self._exit)

    def _killed(self) -> None:
        if not self.alive:
            return
        self.ground.record.note(self.job, self.attempt, "killed", self.rank)
        self.command.run.harmed = True  # perhaps just before it could save what it was told to
        if self.ground.draws.chance(0.5, *self.key, "last words"):
            self.up.cut()
        self.die(-9)

    def die(self, code: int, said: str = "") -> None:
        """End; its node and its command notice."""
        if self.alive:
            self.alive, self.device, self.waits = False, None, False
            self.command.run.lockstep.gone(self)
            self.command.machine.ended(self)
            self.command.exited(self, code, said)
