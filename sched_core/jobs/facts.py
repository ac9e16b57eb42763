"""What is known of a live job, in small records by kind. Each fact is stored here and nowhere else.

``Processes`` and ``command.Command`` hold what the ranks and the shell said. ``Asked``, ``Lateness`` and
``Relocation`` hold what the job was told to do. ``Verdict`` is decided, ``Switch`` is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from gpuslice.wire import Hello

from .failures import Failure, Kind
from .states import JobState

#: The longest pause, in seconds, before a job that has not trained since it was moved is moved again. The
#: first one is a second, and each is twice as long as the one before.
_MOVE_AGAIN_AT_MOST_S = 60.0
_MOST_DOUBLINGS = 30


class Processes(msgspec.Struct):
    """The present processes of a job. A command may train several times, each time in other processes.

    Attributes
    ----------
    trains
        True if they have reached their first boundary.
    placed
        True if they, or earlier processes of this attempt, were given devices.
    cut_off
        True while the node of one of them does not answer.
    stopped
        True while the lease of such a node has run out, so that its processes stand still.
    unheard
        True from the return of their node until one of them greets. What has ended has ended meanwhile.
    first_hello_s
        When the first of them said Hello. None before.
    idle_since_s
        Since when, after a training, not every rank has a process while the command goes on. Else None.
    former_steps
        Optimizer steps that this attempt's former processes have made.
    line, beside
        The Hellos of processes that wait for a place, and of children that train beside the rank. While there
        are such children, the job cannot be suspended.
    """

    trains: bool = False
    placed: bool = False
    cut_off: bool = False
    stopped: bool = False
    unheard: bool = False
    first_hello_s: float | None = None
    idle_since_s: float | None = None
    former_steps: int = 0
    line: tuple[Hello, ...] = ()
    beside: tuple[Hello, ...] = ()

    def greeted(self, now: float) -> None:
        """Note when the first of the processes said Hello."""
        if self.first_hello_s is None:
            self.first_hello_s = now

    def place(self) -> None:
        """Note that the processes were given devices."""
        self.placed = True

    def lose_node(self, *, stopped: bool) -> None:
        """Note that the node of one of the processes does not answer, and whether its lease has run out."""
        self.cut_off = True
        self.stopped = self.stopped or stopped

    def find_node(self) -> None:
        """Note that all nodes of the processes answer again."""
        self.cut_off = self.stopped = self.unheard = False

    def rejoin(self) -> None:
        """Note that the agent of a node of the processes has joined anew: they have to greet again."""
        self.unheard = True

    def heard(self) -> None:
        """Note that one of the processes has greeted again."""
        self.unheard = False

    def complete(self) -> None:
        """Note that all ranks have a process."""
        self.idle_since_s = None

    def begin(self) -> None:
        """Note that the processes have reached their first boundary."""
        self.trains = True

    def queue(self, line: tuple[Hello, ...]) -> None:
        """Set the Hellos of the processes that wait for a place to ``line``."""
        self.line = line

    def stay_beside(self, beside: tuple[Hello, ...]) -> None:
        """Set the Hellos of the processes that train beside the rank to ``beside``."""
        self.beside = beside

    def free(self, now: float, steps: int) -> None:
        """Note that no process is left, and that the attempt has made ``steps`` steps so far."""
        self.trains, self.first_hello_s, self.idle_since_s, self.former_steps = False, None, now, steps

    def renew(self) -> None:
        """Forget all processes: another attempt begins."""
        self.trains, self.first_hello_s, self.idle_since_s = False, None, None
        self.placed = self.cut_off = self.stopped = self.unheard = False
        self.former_steps, self.line, self.beside = 0, (), ()


class Asked(msgspec.Struct):
    """The last order to stop that the job was given.

    Attributes
    ----------
    stop_at
        The boundary to stop at. Only meaningful while it is to stop, or may park for a cancelled stop.
    overshoots
        How often ``stop_at`` had to be raised, because a rank had passed it.
    stopping
        True from the order until all ranks are parked, or the stop is cancelled, or no process is left.
    """

    stop_at: int = 0
    overshoots: int = 0
    stopping: bool = False

    def begin(self) -> None:
        """Note that the job is told to stop. The boundary follows with ``aim``."""
        self.overshoots, self.stopping = 0, True

    def end(self) -> None:
        """Note that the job has stopped, or is not to stop any more."""
        self.stopping = False

    def aim(self, stop_at: int) -> None:
        """Set the boundary at which the ranks are to stop."""
        self.stop_at = stop_at

    def overshot(self) -> None:
        """Count that a rank had already passed the boundary at which it was to stop."""
        self.overshoots += 1

    def forget(self) -> None:
        """Forget the stop: other processes are there, which were told nothing."""
        self.stop_at = self.overshoots = 0


class Keep(Enum):
    """The steps of keeping a job while no scheduler runs."""

    PARK = "park"  # it leaves its devices, and its processes wait
    END = "end"  # its processes end; others go on from its snapshot later


class Way(Enum):
    """The ways in which ranks come to the devices of a lease."""

    START = "start"  # for the first time, or other processes follow on the same devices
    RETURN = "return"


class Entry(msgspec.Struct):
    """How the ranks of a job come to its devices.

    Attributes
    ----------
    way
        How they come, until all of them have arrived. None afterwards, and without devices.
    had
        True if the job has had devices since it was queued.
    """

    way: Way | None = None
    had: bool = False

    def grant(self) -> None:
        """Note that the job is given devices, and that its ranks are told to come."""
        self.way, self.had = Way.RETURN if self.had else Way.START, True

    def follow(self) -> None:
        """Note that other processes come to the devices that the job has."""
        self.way = Way.START

    def come_back(self) -> None:
        """Note that ranks that have parked, or may have, are to come back to the devices that the job has."""
        self.way = Way.RETURN

    def arrived(self) -> None:
        """Note that all ranks are on their devices."""
        self.way = None

    def left(self) -> None:
        """Note that the job has no devices any more."""
        self.way = None

    def renew(self) -> None:
        """Note that the job is queued again."""
        self.way, self.had = None, False


class Lateness(msgspec.Struct):
    """The time of the job's newest order, and how often the job was late.

    Attributes
    ----------
    told_s
        When its state changed last. In a state of ``states.IN_TRANSIT`` it was told then to do something.
    late
        True if it was reported for not having done that in time.
    missed
        How often it was late since it was last suspended as told, or began to train.
    """

    told_s: float = 0.0
    late: bool = False
    missed: int = 0

    def told(self, now: float) -> None:
        """Note that the job is to do something else from now on, and is not late with it."""
        self.told_s, self.late = now, False

    def report(self) -> None:
        """Count that the job is late."""
        self.late, self.missed = True, self.missed + 1

    def parked(self) -> None:
        """Reset the count of late orders: the job was suspended as told."""
        self.missed = 0

    def trained(self) -> None:
        """Note that the job has begun to train: it is not late, and the count of late orders is reset."""
        self.late, self.missed = False, 0


class Relocation(msgspec.Struct):
    """A move of a job to new processes: on another node, or in another number.

    Attributes
    ----------
    left_s, gone_s
        When the last relocation or relaunch began, and when its processes were gone. None once the job trains
        again, and if it had not trained before.
    insisted
        True if its owner wants it on the devices that it goes to. It trains there, or waits for its state.
    stays
        True if its state could not be brought to another node: it trains where the state is before it leaves.
    without
        The nodes of its state that are not waited for any more.
    moves, again_s
        The moves since it trained last. If there were several: when the next one may begin.
    steps, state_bytes
        On its way to other nodes: its steps, and the bytes of its state; 0 bytes: not known.
    refused
        Why its last move to other devices did not succeed. Empty if it did, and while it is under way.
    no_room
        The nodes that have no room for its state, and why.
    ahead
        The node where a process was started ahead, and of which attempt. None: nowhere.
    trains_until_s
        Until when the job trains on at most because a process is started ahead. 0: it has not waited yet.
    """

    insisted: bool = False
    left_s: float | None = None
    gone_s: float | None = None
    stays: bool = False
    without: tuple[int, ...] = ()
    moves: int = 0
    again_s: float = 0.0
    steps: int = 0
    state_bytes: int = 0
    refused: str = ""
    no_room: dict[int, str] = {}
    ahead: tuple[int, int] | None = None
    trains_until_s: float = 0.0

    def find_room(self, no_room: Mapping[int, str]) -> None:
        """Note the nodes that have no room for the state, and why."""
        self.no_room = dict(no_room)

    def start_ahead(self, node: int, attempt: int) -> None:
        """Note that a process of ``attempt`` is started ahead on ``node``."""
        self.ahead = (node, attempt)

    def forget_ahead(self, *, settled: bool) -> None:
        """Note that no process is there any more that was started ahead.

        ``settled`` is False if the job is still to leave. It does not wait for another process then.
        """
        self.ahead = None
        if settled:
            self.trains_until_s = 0.0

    def train_until(self, until_s: float) -> None:
        """Note until when the job trains on at most. That is not put off."""
        self.trains_until_s = min(until_s, self.trains_until_s or until_s)

    def leave_node(self, now: float, *, loses_time: bool) -> None:
        """Note that the processes are told to end, to be started on other nodes.

        ``loses_time`` is True if the job has trained, so that the move costs it time.
        """
        self._count(now)
        if self.left_s is None and loses_time:
            self.left_s = now

    def relaunch(self, now: float, *, loses_time: bool, moving: bool) -> None:
        """Note that the processes are told to end, to be started in another number.

        ``moving``: they were told before, to be started on other nodes. That move goes on.
        """
        if not moving:
            self.left_s = now if loses_time else None
        self._count(now)

    def go_on(self, left_s: float | None, now: float, steps: int) -> None:
        """Note that the processes are gone since ``now``, and the job stands still since ``left_s``.

        ``steps`` are those that the job has made.
        """
        self.left_s, self.gone_s, self.steps = left_s, now, steps

    def carry(self, state_bytes: int) -> None:
        """Note the bytes of the state that goes to other nodes, if they are known."""
        self.state_bytes = state_bytes or self.state_bytes

    def refuse(self, reason: str) -> None:
        """Note why the job was not moved. Empty: it is to be moved, or has been."""
        self.refused = reason

    def insist(self, *, insisted: bool) -> None:
        """Note whether the owner wants the job on the devices that it goes to."""
        self.insisted = insisted

    def arrived(self) -> None:
        """Note that the job trains again: the move is over."""
        self.left_s = self.gone_s = None

    def stay(self, *, stays: bool = True) -> None:
        """Note whether the job must train where its state is before it leaves."""
        self.stays = stays

    def go_without(self, nodes: tuple[int, ...]) -> None:
        """Note that ``nodes`` are not waited for any more."""
        self.without = tuple(sorted({*self.without, *nodes}))

    def wait_again(self, node: int) -> None:
        """Note that ``node``, which answers again, is waited for if it falls silent."""
        self.without = tuple(one for one in self.without if one != node)

    def trained(self) -> None:
        """Note that the job trains: it may be moved again."""
        self.insisted, self.stays, self.moves, self.again_s, self.without = False, False, 0, 0.0, ()
        self.steps = self.state_bytes = 0

    def _count(self, now: float) -> None:
        if self.moves:
            pause_s = min(2.0 ** min(self.moves - 1, _MOST_DOUBLINGS), _MOVE_AGAIN_AT_MOST_S)
            self.again_s = now + pause_s
        self.moves += 1

    def renew(self) -> None:
        """Forget the move: another attempt begins."""
        self.arrived()


class Verdict(msgspec.Struct):
    """When and why a job, or its last attempt, ended.

    Attributes
    ----------
    ended_s
        When it succeeded, failed or was cancelled. None while it has not ended.
    reason, failure
        Why it failed last, or was cancelled; the class of that failure (``failures.Kind``).
    blame
        The class of a failure that the core saw before the command ended.
    outcome
        The state in which it has ended. None while it has not ended.
    absence
        True if it failed because a node did not answer. No restart is spent on that.
    """

    ended_s: float | None = None
    reason: str = ""
    failure: str = ""
    blame: Kind | None = None
    outcome: JobState | None = None
    absence: bool = False

    def decide(self, outcome: JobState) -> None:
        """Note how the job has ended. The first verdict stands."""
        self.outcome = outcome

    def conclude(self, reason: str, now: float, blame: Kind | None) -> None:
        """Note that the job has ended. If it failed, the failure is judged once its processes are gone."""
        self.ended_s, self.reason, self.failure, self.blame = now, reason, "", blame

    def judge(self, failure: Failure, *, absence: bool = False) -> None:
        """Set the class and the reason of the job's failure, and whether a silent node was the cause."""
        self.failure, self.reason, self.absence = failure.kind.value, failure.reason, absence

    def reopen(self) -> None:
        """Note that another attempt begins: the job has not ended."""
        self.ended_s = self.blame = self.outcome = None
        self.absence = False


class Switch(msgspec.Struct):
    """The cost of a job's last switch: predicted, its error, and measured. None: not known."""

    predicted_s: float | None = None
    error_s: float | None = None
    cost_s: float | None = None

    def begin(self, predicted_s: float | None, error_s: float | None) -> None:
        """Note that the job is told to stop, and what the switch is predicted to cost."""
        self.predicted_s, self.error_s = predicted_s, error_s

    def end(self, cost_s: float) -> None:
        """Note that the job trains again, and what the switch has cost."""
        self.cost_s = cost_s
