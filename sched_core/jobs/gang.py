"""A job as the live core knows it: what the policy wants of it, its ranks, and the lease they really hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf

import msgspec

from gpuslice.errors import IllegalTransitionError, InvariantError
from gpuslice.sched_core.job import JobSpec

from .accounts import AccountedJob, Activity, Stretch
from .command import Command, Purpose
from .conditions import Conditions
from .facts import Asked, Entry, Keep, Lateness, Processes, Relocation, Switch, Verdict
from .failures import Kind
from .kept import KeptJob
from .phase import state_of, write
from .program import Program
from .rank import Rank, RankPhase
from .refusals import Refusals
from .states import TRANSITIONS, JobState, Trigger
from .step_time import StepTime
from .targets import claim_on
from .wait_reasons import Since

_HISTORY = 40
#: A command that has run for so long without a Hello may be no training, and be at work without devices.
_MAY_BE_AT_WORK_S = 60.0
_TRAINING = (RankPhase.PARKED, RankPhase.COMING, RankPhase.ON)
_THERE = (*_TRAINING, RankPhase.LEAVING)


class Gang(AccountedJob):
    """A job and its ranks.

    ``running`` and ``placement`` of the base are what the policy wants; ``lease`` is what the ranks really
    have. The core works until the two agree.

    Parameters
    ----------
    spec, number, program
        What was asked for, the order of arrival, and the command.
    kept, last_lease, state_nodes
        Of a job that an earlier scheduler has kept: what is known of it, and these facts.

    Attributes
    ----------
    lease, home
        Devices held under ``epoch``, and devices on which it was last suspended, rank order; empty if none.
    width, world
        How many ranks its last lease was for, from the first on (0: there was none), and the epoch since when
        these are the ones that train. The others of an elastic job wait.
    last_lease
        The devices of its present or last lease, rank order; empty if it has not begun.
    shut_out
        True if all devices that it could be on are closed to it (``closed_devices``).
    requested_devices
        Devices its owner wants it moved to, until that has been done; empty when none.
    held
        True if its owner keeps it from running. The policy does not see it then.
    conditions
        What it waits for before it may start.
    keep
        How far it is to go to be kept while no scheduler runs. None: it is scheduled.
    shown
        True if the policy may choose it.
    asked, entry, lateness
        The stop that it was told to make last; how its ranks come to its devices; how often it was late with
        what it was told.
    refusals
        Suspends and resumes that it has refused in a row, and when to try again.
    not_before_s
        When its next attempt may start.
    fair_share_s, fragmentation_s
        How long it waited for its quota and for devices that were free (``wait_reasons``).
    waits_since
        Since when it waits for one reason, and what its stopwatches showed then.
    finishing
        True if it has made all the steps that its owner wanted, and is about to end well.
    switch
        The cost of its last switch.
    attempt, relaunches
        How often it was started again; how many of these starts were for other devices, not for a failure.
    nodes, state_nodes
        Where the processes of this attempt are, and where its newest state is, if it has any; rank order.
    command, processes, relocation
        Its command; its present processes; its move to another node, or to another number of processes.
    step_time
        How long its steps take, in this attempt, if it said how many it has.
    deadline_missed
        True if it had not succeeded by its deadline.
    verdict
        When and why the job, or its last attempt, ended.
    borrowed, lent
        The devices of its trial, rank order; empty before and after. True if another job's trial has borrowed
        a device of those that the policy wants it on.
    tried
        True if its trial is over, or it was to have none.
    given_up
        True if its owner wants no further attempt.
    """

    __slots__ = (
        *("asked", "attempt", "borrowed", "command", "conditions", "deadline_missed", "entry", "finishing"),
        *("fair_share_s", "fragmentation_s", "given_up", "held", "history", "home", "keep", "last_lease"),
        *("lateness", "lease", "lent", "nodes", "not_before_s", "processes", "program", "ranks", "refusals"),
        *("relaunches", "relocation", "requested_devices", "shown", "shut_out", "state_nodes", "step_time"),
        *("switch", "tried", "verdict", "waits_since", "width", "world"),
    )

    def __init__(
        self,
        spec: JobSpec,
        number: int,
        program: Program,
        *,
        kept: KeptJob | None = None,
        last_lease: tuple[int, ...] = (),
        state_nodes: tuple[int, ...] = (),
    ) -> None:
        super().__init__(spec, number)
        self.program = program
        self.ranks = tuple(map(Rank, range(spec.devices if spec.relaunch else spec.ranks)))
        self.width = self.world = 0
        self.lease: tuple[int, ...] = ()
        self.home: tuple[int, ...] = ()
        self.last_lease, self.state_nodes = last_lease, state_nodes
        self.borrowed: tuple[int, ...] = ()
        self.nodes: tuple[int, ...] = ()
        self.requested_devices: tuple[int, ...] = ()
        self.held = self.lent = self.shown = self.given_up = self.finishing = self.deadline_missed = False
        self.shut_out = False
        self.conditions = Conditions(spec.begin_unix_s, spec.after)
        self.keep: Keep | None = None
        self.command, self.processes, self.relocation = Command(), Processes(), Relocation()
        self.asked, self.entry, self.lateness = Asked(), Entry(), Lateness()
        self.verdict, self.switch = Verdict(), Switch()
        self.refusals = Refusals()
        self.attempt = self.relaunches = 0
        self.not_before_s = self.fair_share_s = self.fragmentation_s = 0.0
        self.waits_since: Since | None = None
        self.step_time = StepTime()
        self.tried = not spec.trial_batches
        self.history: deque[tuple[float, str]] = deque(maxlen=_HISTORY)
        if kept is not None:
            for name in kept.tally.__struct_fields__:
                setattr(self, name, getattr(kept.tally, name))
            self.keep, self.stretch = Keep.END, Stretch(Activity.HELD, kept.kept_s)
            self.relocation = Relocation(steps=kept.steps, state_bytes=kept.state_bytes)
            self.command, self.entry = Command(anew=kept.anew), Entry(had=kept.begun)
            self.lateness = Lateness(missed=kept.missed)
            self.verdict = Verdict(reason=kept.reason, failure=kept.failure)

    @property
    def state(self) -> JobState:
        """Its state, derived from its facts."""
        return state_of(self.verdict, self.command, self.asked, self.entry, self.lease)

    @property
    def wanted(self) -> tuple[int, ...]:
        """The devices that the job should be on now (``targets``). Empty if it should have none."""
        return claim_on(self).devices(self)

    @property
    def withdrawn(self) -> bool:
        """True if the policy must not see the job, which has no part of its tenant's quota (``targets``)."""
        return claim_on(self).withdraws

    @property
    def placed(self) -> bool:
        """True if the job should have devices, by the policy's plan or for its trial."""
        return self.running or bool(self.borrowed)

    @property
    def ready(self) -> bool:
        """True if all ``members`` have said Hello."""
        return not self.present(RankPhase.ABSENT)

    @property
    def processes_gone(self) -> bool:
        """True if the job has no process left that can touch a device."""
        return not self.command.launched or (self.command.exit_code is not None and not self.there())

    @property
    def over(self) -> bool:
        """True if the job has ended for good, and none of its processes is left."""
        return self.state.ended and self.processes_gone

    def may_have_begun(self, now: float) -> bool:
        """Return True if the job may have done something that another attempt would do again.

        A training does nothing before it has trained. A command without a Hello may be none.
        """
        return self.processes.trains or bool(self.state_nodes) or self.may_be_no_training(now)

    def may_be_no_training(self, now: float) -> bool:
        """Return True if the command has run for so long without a Hello that it may do something else."""
        greeted = self.processes.first_hello_s is not None
        return not greeted and now >= self.command.launched_s + _MAY_BE_AT_WORK_S

    @property
    def told_to_end(self) -> bool:
        """True if its processes are to end, for good or so that it can be started anew."""
        ends = self.state.ended or self.relocating or self.state is JobState.RELAUNCHING
        return ends or bool(self.command.first_code)

    @property
    def may_restart(self) -> bool:
        """True if the job failed and another attempt is allowed."""
        failed = self.state is JobState.FAILED and (self.tried or self.verdict.absence)
        left = self.failures < self.spec.max_restarts or self.may_grow or self.verdict.absence
        return failed and not self.given_up and left and self.verdict.blame is not Kind.TIME_LIMIT

    @property
    def failures(self) -> int:
        """The number of times that the job was started again after a failure."""
        return self.attempt - self.relaunches - self.command.misses

    @property
    def relocating(self) -> bool:
        """True while its processes are being ended because others are to be started on other nodes."""
        return self.command.ending is Purpose.RELOCATE

    @property
    def needs_relaunch(self) -> bool:
        """True if the job should have another number of devices than its command was started for."""
        return self.spec.relaunch and bool(self.wanted) and len(self.wanted) != len(self.ranks)

    @property
    def keepers(self) -> int:
        """The number of ranks, from rank 0 on, whose snapshots hold all state: 1 if ranks come and go."""
        return 1 if self.spec.joined else len(self.ranks)

    @property
    def portable(self) -> bool:
        """True if other processes can continue from the parked job's snapshots."""
        return all(rank.portable for rank in self.members[: self.keepers])

    @property
    def portable_later(self) -> bool:
        """True if other processes can continue from the job's snapshots, now or after more training."""
        return all(rank.portable or rank.portable_later for rank in self.members[: self.keepers])

    @property
    def may_grow(self) -> bool:
        """True if the job's memory limit may be raised."""
        return self.spec.device_memory_bytes < self.spec.most_device_memory_bytes

    @property
    def reached_max_steps(self) -> bool:
        """True if the job has made all the steps that its owner wants."""
        most = self.spec.max_steps
        return bool(most) and self.steps >= most

    @property
    def steps(self) -> int:
        """The optimizer steps that this attempt has made, in all of its trainings."""
        return self.processes.former_steps + max(rank.step for rank in self.ranks)

    @property
    def steps_so_far(self) -> int:
        """The steps that the job has made. On its way to other processes they are those of the last ones."""
        return max(self.steps, self.relocation.steps)

    def keep_off(self, closed: frozenset[int], *, shut_out: bool) -> None:
        """Note which devices are closed to the job, and whether it can be on no other ones."""
        self.closed, self.shut_out = closed, shut_out

    def keep_for_later(self, keep: Keep | None) -> None:
        """Note how far the job is to go to be kept while no scheduler runs. None: it is scheduled again."""
        self.keep = keep

    def show(self, *, shown: bool) -> None:
        """Note whether the policy may choose the job from now on."""
        self.shown = shown

    def assign(self, devices: tuple[int, ...]) -> None:
        """Note that the policy's plan puts the job on ``devices``."""
        self.running, self.placement = True, devices

    def unassign(self, now: float) -> None:
        """Note that the policy's plan gives the job no devices from ``now`` on."""
        self.running, self.since_s = False, now

    def progress_from(self, when_s: float) -> None:
        """Set the time from which policies see the job make progress, or wait. Infinite: neither yet."""
        self.since_s = when_s

    def occupy(self, devices: tuple[int, ...]) -> None:
        """Give the job a lease on ``devices``. Another number of devices begins another world of ranks."""
        if self.width != len(devices):
            self.width, self.world = len(devices), self.epoch
        self.lease = self.last_lease = devices
        self.processes.place()

    def vacate(self) -> None:
        """Take the lease away from the job."""
        self.lease = ()

    def begin_epoch(self) -> None:
        """Begin another epoch, so that what ranks say of former leases does not count."""
        self.epoch += 1

    def forget_width(self) -> None:
        """Forget how many ranks the last lease was for: all ranks may have a part in the next one."""
        self.width = self.world = 0

    def renew_ranks(self, count: int) -> None:
        """Replace the ranks by ``count`` new ones, which have no process yet."""
        self.ranks = tuple(map(Rank, range(count)))

    def finish(self) -> None:
        """Note that the job is to end as a success once it has parked."""
        self.finishing = True

    def reweigh(self, weight: float) -> None:
        """Set the job's weight."""
        self.spec = msgspec.structs.replace(self.spec, weight=weight)

    def adjust(self, changes: Mapping[str, float]) -> None:
        """Change fields of what was asked for: the job's weight, priority or time limit."""
        self.spec = msgspec.structs.replace(self.spec, **changes)

    def grow(self) -> None:
        """Double the job's memory limit, up to its largest, and allow the job one more restart for that."""
        limit_bytes = min(2 * self.spec.device_memory_bytes, self.spec.most_device_memory_bytes)
        more = self.spec.max_restarts + 1
        self.spec = msgspec.structs.replace(self.spec, device_memory_bytes=limit_bytes, max_restarts=more)

    def borrow(self, devices: tuple[int, ...]) -> None:
        """Put the job on trial on ``devices``, of which the policy does not know."""
        self.borrowed, self.since_s = devices, inf

    def give_back(self, now: float) -> None:
        """End the job's trial on borrowed devices."""
        self.borrowed, self.since_s = (), now

    def lend(self) -> None:
        """Note that a trial borrows the job's devices. The policy's plan still has the job on them."""
        self.lent, self.since_s = True, inf

    def count_leaving(self) -> None:
        """Count a migration if the job leaves its devices for others, else a preemption."""
        moves = bool(self.wanted) and self.wanted != self.lease
        self.migrations += moves
        self.preemptions += not moves

    def take_back(self, now: float) -> None:
        """Note that no trial borrows the job's devices any more: the policy's plan holds again."""
        self.lent = False
        if self.running:
            stays = self.state is JobState.RUNNING and self.lease == self.placement
            self.since_s = self.counts_from(now) if stays else inf

    def stand_still(self) -> None:
        """Show policies no progress until the job is back on the devices that the plan gives it, if any."""
        if self.running and not self.borrowed:
            self.since_s = inf

    @property
    def activity(self) -> Activity:
        """The activity to which the job's time counts now."""
        if self.state.ended:
            return Activity.ENDED
        waits = not self.lease or self.state in (JobState.QUEUED, JobState.SUSPENDED)
        if waits or self.processes.stopped:
            aside = self.held or self.keep or (waits and self.conditions.unmet)
            return Activity.HELD if aside else Activity.WAITS
        leaves = self.state is JobState.SUSPENDING and not self.present(RankPhase.PARKED, RankPhase.COMING)
        if self.state is JobState.RUNNING or leaves:
            counts = self.processes.trains or self.processes.idle_since_s is not None
            return Activity.TRAINS if counts else Activity.SETS_UP
        return Activity.SWITCHES

    def book(self, now: float) -> None:
        """Add up the job's time if its activity has changed, and note the new one."""
        self.account(self.activity, now, len(self.lease))

    def end_setup(self, now: float) -> None:
        """Note that the job has reached its first boundary: its set-up is over."""
        self.processes.begin()
        self.book(now)

    def begin_again(self, when_s: float, ranks: int = 0) -> None:
        """Prepare the job for its next attempt, which starts at ``when_s``. What it attained is kept.

        ``ranks`` is how many ranks the command of a relaunched job is told to start; 0: as many as at first.
        """
        self.attempt += 1
        self.finishing = False
        self.command.renew()
        self.processes.renew()
        self.relocation.renew()
        self.asked.forget()
        self.lateness.parked()
        self.begin_setup(when_s)
        self.renew_ranks(ranks or (self.demand if self.spec.relaunch else self.spec.ranks))
        self.forget_width()
        self.refusals.forget()
        self.not_before_s = when_s
        self.step_time = StepTime()

    def pardon(self) -> None:
        """Note that the owner wants the job again, whatever it did: it has all its restarts again."""
        self.relaunches = self.attempt - self.command.misses
        self.given_up = self.held = False

    def excuse(self) -> None:
        """Note that the job was started again for no failure of its own: no restart is spent on that."""
        self.relaunches += 1

    def begin_elsewhere(self, now: float, ranks: int = 0) -> None:
        """Prepare the job to start in new processes. It stands still until then, unless it is held."""
        left_s, steps = None if self.held else self.relocation.left_s, self.steps_so_far
        self.begin_again(now, ranks)
        self.relocation.go_on(left_s, now, steps)
        self.relaunches += 1

    @property
    def members(self) -> tuple[Rank, ...]:
        """The ranks that take part in the present or the last lease; all ranks before the first lease."""
        return self.ranks[: self.width] if self.width else self.ranks

    def waiting_ranks(self) -> list[Rank]:
        """Return the ranks of an elastic job that have a process but no part in its lease."""
        return [rank for rank in self.ranks[len(self.members) :] if rank.phase in _TRAINING]

    def present(self, *phases: RankPhase) -> list[Rank]:
        """Return the ``members`` that are in one of ``phases``."""
        return [rank for rank in self.members if rank.phase in phases]

    @property
    def bound(self) -> bool:
        """True if the job can resume only where it was suspended."""
        return any(rank.bound for rank in self.ranks)

    def there(self) -> list[Rank]:
        """Return the ranks that have a process, as far as is known."""
        return [rank for rank in self.ranks if rank.phase in _THERE]

    def training(self) -> list[Rank]:
        """Return the ``members`` whose script has a training loop to continue."""
        return self.present(*_TRAINING)

    def all_on(self) -> bool:
        """Return True if every training rank, and at least one, is on its device."""
        phases = {rank.phase for rank in self.training()}
        return phases == {RankPhase.ON}

    def all_parked(self) -> bool:
        """Return True if every training rank, and at least one, is parked at its stop or later.

        Return False while a rank that has said Bye, and may still be on its device, exists.
        """
        ranks = self.training()
        if not ranks or self.present(RankPhase.LEAVING):
            return False
        return all(rank.phase is RankPhase.PARKED and rank.boundary >= self.asked.stop_at for rank in ranks)

    def allows(self, trigger: Trigger) -> bool:
        """Return True if the job's state allows ``trigger`` now."""
        return (self.state, trigger) in TRANSITIONS

    def move(self, trigger: Trigger, now: float) -> None:
        """Note that ``trigger`` has happened, which leads to the next state by the table.

        Raises
        ------
        IllegalTransitionError
            If the table has no such transition.
        InvariantError
            If the facts make another state than the table.
        """
        if not self.allows(trigger):
            raise self.illegal(trigger.value)
        expected = TRANSITIONS[self.state, trigger]
        write(trigger, expected, self.verdict, self.command, self.asked, self.entry)
        if trigger in (Trigger.ALL_PARKED, Trigger.EMPTY):
            self.vacate()
        if self.state is not expected:
            raise InvariantError(f"job {self.id} is {self.state.value} after {trigger.value}")
        self.lateness.told(now)
        if trigger is Trigger.ALL_PARKED:
            self.lateness.parked()
        self.book(now)
        self.history.append((now, f"{trigger.value} -> {self.state.value}"))

    def illegal(self, what: str) -> IllegalTransitionError:
        """Return the error for ``what``, which cannot happen now, with the job's history."""
        past = "; ".join(f"{when:.3f} s: {what}" for when, what in self.history)
        return IllegalTransitionError(
            f"{what!r} is impossible while job {self.id} is in the state '{self.state.value}'",
            f"its history: {past or 'none'}",
        )
