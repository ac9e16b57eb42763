"""A job as the live core knows it: the policy's picture of it, its ranks, and the lease they really hold."""

from __future__ import annotations

from collections import deque
from math import inf

from gpuslice.errors import IllegalTransitionError
from gpuslice.sched_core.job import JobSpec
from gpuslice.wire import Hello

from .accounts import AccountedJob, Activity
from .failures import Kind
from .program import Program
from .rank import Rank, RankPhase
from .refusals import Refusals
from .states import TRANSITIONS, JobState, Trigger
from .step_time import StepTime
from .wait_reasons import Since

_HISTORY = 40
_TRAINING = (RankPhase.PARKED, RankPhase.COMING, RankPhase.ON)
_THERE = (*_TRAINING, RankPhase.LEAVING)


class Gang(AccountedJob):
    """A job and its ranks.

    ``running`` and ``placement`` of the base are what the policy wants; ``lease`` is what the ranks really
    have. The core works until the two agree.

    Attributes
    ----------
    state
        See ``states``.
    lease, home
        Devices held under ``epoch``, rank order; empty when none. Those it was last suspended on.
    width, world
        How many of the ranks, the first ones, its last lease was for (0: there was none), and the epoch since
        when these are the ones that train. The others of an elastic job wait.
    requested_devices
        Devices its owner wants it moved to, until that has been done; empty when none.
    held
        Whether its owner keeps it from running; the policy does not see it then.
    stop_at
        Boundary of the present suspend; only meaningful while suspending.
    overshoots
        How often that had to be raised.
    refusals
        Suspends and resumes that it has refused in a row, and when to try again.
    not_before_s
        When its next attempt may start.
    ended_s
        When it succeeded, failed or was cancelled.
    ordered_s
        When it was told what it is about to do (``states.IN_TRANSIT``).
    late
        Whether it was reported for not having done that in time.
    missed
        How often that happened since it was last suspended as told.
    fair_share_s, fragmentation_s
        How long it waited for its quota and for devices that were free (``wait_reasons``).
    waits_since
        Since when it waits for one reason, and what its clocks showed then.
    finishing
        Whether it has made all the steps that its owner wanted, and is about to end well.
    trains
        Whether this attempt has reached its first boundary.
    switch_predicted_s, switch_error_s, switch_s
        What its last switch was to cost and how far that may be off, if anybody knew, and what it did cost.
    attempt, relaunches
        How often it was started again; of that, how often for other devices, not for a failure.
    nodes, state_nodes, relocating
        Where the processes of this attempt are, and where its newest state is, if it has any; rank order.
        Whether the processes are being ended because others are to be started on other nodes.
    left_s, gone_s
        When its last relocation or relaunch began, and when its processes were gone; ``None`` once it trains
        again, and if it had not trained before.
    launched, launched_s
        Whether this attempt's command was started, and when its newest start was; a queued job may have to
        wait for that (``prestart``).
    first_hello_s, idle_since_s
        When the first of its present processes said Hello; since when its places are free, or not all taken
        again, while its command goes on.
    former_steps, line, beside
        Optimizer steps of this attempt's former processes; the Hellos of those that wait for a place, and of
        children that train beside the rank. While there are any of these, the job cannot be suspended.
    step_time
        How long its steps take, in this attempt, if it said how many it has.
    deadline_missed
        Whether it had not succeeded by its deadline.
    exit_code
        Of the command that was started, once it ended; before a next attempt, the last one's.
    said
        What the command wrote last that tells why it failed.
    reason, failure
        Why it failed, the last time, or was cancelled; the class of that failure (``failures.Kind``).
    blame
        The class of a failure that the core saw before the command ended.
    borrowed, lent
        The devices of its trial, rank order; empty before and after. Whether somebody's trial has borrowed a
        device of those that the policy wants it on.
    tried
        Whether its trial is over, or it was to have none.
    given_up
        Whether its owner wants no further attempt.
    """

    __slots__ = (
        *("attempt", "beside", "blame", "borrowed", "deadline_missed", "ended_s", "exit_code", "failure"),
        *("fair_share_s", "finishing", "first_hello_s", "former_steps", "fragmentation_s", "given_up"),
        *("gone_s", "held", "history", "home", "idle_since_s", "late", "launched", "launched_s", "lease"),
        *("left_s", "lent", "line", "missed", "nodes", "not_before_s", "ordered_s", "overshoots", "program"),
        *("ranks", "reason", "refusals", "relaunches", "relocating", "requested_devices", "said"),
        *("state", "state_nodes", "step_time", "stop_at", "switch_error_s", "switch_predicted_s"),
        *("switch_s", "trains", "tried", "waits_since", "width", "world"),
    )

    def __init__(self, spec: JobSpec, number: int, program: Program) -> None:
        super().__init__(spec, number)
        self.program = program
        self.ranks = tuple(map(Rank, range(spec.devices if spec.relaunch else spec.ranks)))
        self.width = self.world = 0
        self.state = JobState.QUEUED
        self.lease: tuple[int, ...] = ()
        self.home: tuple[int, ...] = ()
        self.borrowed: tuple[int, ...] = ()
        self.nodes: tuple[int, ...] = ()
        self.state_nodes: tuple[int, ...] = ()
        self.requested_devices: tuple[int, ...] = ()
        self.said = self.reason = self.failure = ""
        self.held = self.lent = self.late = self.given_up = self.relocating = False
        self.launched = self.trains = self.finishing = self.deadline_missed = False
        self.stop_at = self.overshoots = self.missed = 0
        self.refusals = Refusals()
        self.attempt = self.relaunches = self.former_steps = 0
        self.line: tuple[Hello, ...] = ()
        self.beside: tuple[Hello, ...] = ()
        self.idle_since_s: float | None = None
        self.not_before_s = self.ordered_s = self.launched_s = self.fair_share_s = self.fragmentation_s = 0.0
        self.waits_since: Since | None = None
        self.first_hello_s: float | None = None
        self.left_s: float | None = None
        self.gone_s: float | None = None
        self.ended_s: float | None = None
        self.switch_predicted_s: float | None = None
        self.switch_error_s: float | None = None
        self.switch_s: float | None = None
        self.step_time = StepTime()
        self.exit_code: int | None = None
        self.blame: Kind | None = None
        self.tried = not spec.trial_batches
        self.history: deque[tuple[float, str]] = deque(maxlen=_HISTORY)

    @property
    def wanted(self) -> tuple[int, ...]:
        """The devices it is to be on now: the policy's, unless there is a trial, its own or another's."""
        if self.borrowed:
            return self.borrowed
        return self.placement if self.running and not self.lent else ()

    @property
    def placed(self) -> bool:
        """Whether it is to have devices, by the policy's plan or for its trial."""
        return self.running or bool(self.borrowed)

    @property
    def ready(self) -> bool:
        """Whether all ranks have said Hello."""
        return not self.present(RankPhase.ABSENT)

    @property
    def processes_gone(self) -> bool:
        """Whether nothing of it can touch a device any more."""
        return not self.launched or (self.exit_code is not None and not self.there())

    @property
    def may_restart(self) -> bool:
        """Whether it failed and another attempt is allowed."""
        failed = self.state is JobState.FAILED and self.tried
        return failed and not self.given_up and (self.failures < self.spec.max_restarts or self.may_grow)

    @property
    def failures(self) -> int:
        """How often it was started again after a failure."""
        return self.attempt - self.relaunches

    @property
    def needs_relaunch(self) -> bool:
        """Whether it is wanted on another number of devices than its command was started for."""
        return self.spec.relaunch and bool(self.wanted) and len(self.wanted) != len(self.ranks)

    @property
    def keepers(self) -> int:
        """How many ranks, the first ones, keep all of its state: one of a job whose ranks come and go."""
        return 1 if self.spec.joined else len(self.ranks)

    @property
    def portable(self) -> bool:
        """Whether other processes can go on from its snapshots, now that it is parked."""
        return all(rank.portable for rank in self.members[: self.keepers])

    @property
    def portable_later(self) -> bool:
        """Whether they will be able to, if it trains on."""
        return all(rank.portable or rank.portable_later for rank in self.members[: self.keepers])

    @property
    def may_grow(self) -> bool:
        """Whether its memory limit may become larger."""
        return self.spec.device_memory_bytes < self.spec.most_device_memory_bytes

    @property
    def reached_max_steps(self) -> bool:
        """Whether it has made all the steps that its owner wants."""
        most = self.spec.max_steps
        return bool(most) and self.steps >= most

    @property
    def steps(self) -> int:
        """Optimizer steps that this attempt has made, in all of its trainings."""
        return self.former_steps + max(rank.step for rank in self.ranks)

    def borrow(self, devices: tuple[int, ...]) -> None:
        """Be tried on ``devices``, which the policy knows nothing of."""
        self.borrowed, self.since_s = devices, inf

    def give_back(self, now: float) -> None:
        """End the trial."""
        self.borrowed, self.since_s = (), now

    def lend(self) -> None:
        """Be nowhere for a while, although it has devices by the policy's plan."""
        self.lent, self.since_s = True, inf

    def count_leaving(self) -> None:
        """Count that it leaves its devices: for others that it is to have, or because it is to have none."""
        moves = bool(self.wanted) and self.wanted != self.lease
        self.migrations += moves
        self.preemptions += not moves

    def take_back(self, now: float) -> None:
        """Have all devices again that the policy wants it on."""
        self.lent = False
        if self.running:
            stays = self.state is JobState.RUNNING and self.lease == self.placement
            self.since_s = self.counts_from(now) if stays else inf

    def stand_still(self) -> None:
        """Make no progress until it is back on its devices, if it is to have some by the policy's plan."""
        if self.running and not self.borrowed:
            self.since_s = inf

    @property
    def activity(self) -> Activity:
        """What it does, as far as its time is concerned."""
        if self.state.ended:
            return Activity.ENDED
        if not self.lease or self.state in (JobState.QUEUED, JobState.SUSPENDED):
            return Activity.HELD if self.held else Activity.WAITS
        leaves = self.state is JobState.SUSPENDING and not self.present(RankPhase.PARKED, RankPhase.COMING)
        if self.state is JobState.RUNNING or leaves:
            counts = self.trains or self.idle_since_s is not None
            return Activity.TRAINS if counts else Activity.SETS_UP
        return Activity.SWITCHES

    def book(self, now: float) -> None:
        """See whether it does something else from now on."""
        self.account(self.activity, now, len(self.lease))

    def end_setup(self, now: float) -> None:
        """It has reached its first boundary."""
        self.trains = True
        self.book(now)

    def begin_again(self, when_s: float, ranks: int = 0) -> None:
        """Become a job whose next attempt starts at ``when_s``; what it attained stays its own.

        ``ranks`` of a job whose command is told; without them as many as in the beginning.
        """
        self.attempt += 1
        self.launched = self.finishing = self.relocating = self.trains = False
        self.begin_setup(when_s)
        usual = self.demand if self.spec.relaunch else self.spec.ranks
        self.ranks = tuple(map(Rank, range(ranks or usual)))
        self.width = self.world = 0
        self.ended_s = self.blame = self.first_hello_s = self.left_s = self.gone_s = None
        self.former_steps, self.idle_since_s, self.line, self.beside = 0, None, (), ()
        self.stop_at = self.overshoots = self.missed = 0
        self.refusals.forget()
        self.not_before_s = when_s
        self.said = ""
        self.step_time = StepTime()

    def begin_elsewhere(self, now: float, ranks: int = 0) -> None:
        """Become a job whose processes start elsewhere. It stands still since it left, unless it is held."""
        left_s = None if self.held else self.left_s
        self.begin_again(now, ranks)
        self.left_s, self.gone_s = left_s, now
        self.relaunches += 1

    @property
    def members(self) -> tuple[Rank, ...]:
        """The ranks that have a part in its lease, or had in the last one; all, before the first."""
        return self.ranks[: self.width] if self.width else self.ranks

    def waiting_ranks(self) -> list[Rank]:
        """The processes of an elastic job that its lease is not for."""
        return [rank for rank in self.ranks[len(self.members) :] if rank.phase in _TRAINING]

    def present(self, *phases: RankPhase) -> list[Rank]:
        """The members in one of ``phases``."""
        return [rank for rank in self.members if rank.phase in phases]

    @property
    def bound(self) -> bool:
        """Whether it can resume only where it was suspended."""
        return any(rank.bound for rank in self.ranks)

    @property
    def away_from_home(self) -> bool:
        """Whether it is to run on devices on which it cannot resume."""
        return self.running and self.placement != self.home_placement and self.bound

    @property
    def home_placement(self) -> tuple[int, ...]:
        """As many devices as it is to have, beginning with those that its ranks left last."""
        home = self.home[: len(self.placement)]
        others = [device for device in self.placement if device not in home]
        return (*home, *others[: len(self.placement) - len(home)])

    def there(self) -> list[Rank]:
        """The ranks whose process exists, as far as anybody knows."""
        return [rank for rank in self.ranks if rank.phase in _THERE]

    def training(self) -> list[Rank]:
        """The ranks that have a training loop to go on with."""
        return self.present(*_TRAINING)

    def all_on(self) -> bool:
        """Whether every training rank, and at least one, is on its device."""
        phases = {rank.phase for rank in self.training()}
        return phases == {RankPhase.ON}

    def all_parked(self) -> bool:
        """Whether every training rank, and at least one, is parked, all at the same boundary.

        Not while another has said Bye and its process, which may still be on the device, exists.
        """
        ranks = self.training()
        if not ranks or self.present(RankPhase.LEAVING):
            return False
        return all(rank.phase is RankPhase.PARKED and rank.boundary >= self.stop_at for rank in ranks)

    def allows(self, trigger: Trigger) -> bool:
        """Whether ``trigger`` may come now."""
        return (self.state, trigger) in TRANSITIONS

    def move(self, trigger: Trigger, now: float) -> None:
        """Go to the next state.

        Raises
        ------
        IllegalTransitionError
            If the table has no such transition.
        """
        if not self.allows(trigger):
            raise self.illegal(trigger.value)
        self.state = TRANSITIONS[self.state, trigger]
        self.ordered_s, self.late = now, False
        if trigger is Trigger.ALL_PARKED:
            self.missed = 0
        self.book(now)
        self.history.append((now, f"{trigger.value} -> {self.state.value}"))

    def illegal(self, what: str) -> IllegalTransitionError:
        """The error for something that cannot happen now, with the job's history."""
        past = "; ".join(f"{when:.3f} s: {what}" for when, what in self.history)
        return IllegalTransitionError(
            f"{what!r} is impossible while job {self.id} is in the state '{self.state.value}'",
            f"its history: {past or 'none'}",
        )
