"""What is known of a live job, in small records by kind. Each fact is written here and nowhere else.

Heard: ``Command`` and ``Processes``, by what the shell and the ranks say. Told: ``Asked``, ``Lateness`` and
``Relocation``, by what the job was told to do. Decided: ``Verdict``. Measured: ``Switch``.
"""

from __future__ import annotations

import msgspec

from gpuslice.wire import Hello

from .failures import Failure, Kind


class Command(msgspec.Struct):
    """The command of the present attempt.

    Attributes
    ----------
    launched, launched_s
        True if it was started, and when the newest start was. A queued job may have to wait for that.
    exit_code
        What it ended with, or the last attempt's did. None while it runs.
    said
        What it wrote last that tells why it failed.
    """

    launched: bool = False
    launched_s: float = 0.0
    exit_code: int | None = None
    said: str = ""

    def start(self, now: float) -> None:
        """It is started now."""
        self.launched, self.launched_s, self.exit_code = True, now, None

    def end(self, code: int, said: str) -> None:
        """It has ended."""
        self.exit_code, self.said = code, said

    def renew(self) -> None:
        """Another attempt begins, whose command is not started yet."""
        self.launched, self.said = False, ""


class Processes(msgspec.Struct):
    """The present processes of a job: a command may train several times, each time with others.

    Attributes
    ----------
    trains
        True if they have reached their first boundary.
    first_hello_s
        When the first of them said Hello.
    idle_since_s
        Since when no process has the places, or not all are taken again, while the command goes on.
    former_steps
        Optimizer steps that this attempt's former processes have made.
    line, beside
        The Hellos of those that wait for a place, and of children that train beside the rank. While there are
        any of these, the job cannot be suspended.
    """

    trains: bool = False
    first_hello_s: float | None = None
    idle_since_s: float | None = None
    former_steps: int = 0
    line: tuple[Hello, ...] = ()
    beside: tuple[Hello, ...] = ()

    def greeted(self, now: float) -> None:
        """One of them has said Hello."""
        if self.first_hello_s is None:
            self.first_hello_s = now

    def complete(self) -> None:
        """All of them are there."""
        self.idle_since_s = None

    def begin(self) -> None:
        """They have reached their first boundary."""
        self.trains = True

    def queue(self, line: tuple[Hello, ...]) -> None:
        """Let ``line`` wait for a place."""
        self.line = line

    def stay_beside(self, beside: tuple[Hello, ...]) -> None:
        """Let ``beside`` train beside the rank."""
        self.beside = beside

    def free(self, now: float, steps: int) -> None:
        """None is left; the attempt has made ``steps`` steps."""
        self.trains, self.first_hello_s, self.idle_since_s, self.former_steps = False, None, now, steps

    def renew(self) -> None:
        """Another attempt begins."""
        self.trains, self.first_hello_s, self.idle_since_s = False, None, None
        self.former_steps, self.line, self.beside = 0, (), ()


class Asked(msgspec.Struct):
    """The stop that a job was told of last.

    Attributes
    ----------
    stop_at
        At which boundary. Only meaningful while it is to stop, or may park for a stop that was called off.
    overshoots
        How often that had to be raised.
    """

    stop_at: int = 0
    overshoots: int = 0

    def begin(self) -> None:
        """The job is told to stop; where, is said next."""
        self.overshoots = 0

    def aim(self, stop_at: int) -> None:
        """Its ranks are to stop at ``stop_at``."""
        self.stop_at = stop_at

    def overshot(self) -> None:
        """A rank had passed that."""
        self.overshoots += 1

    def forget(self) -> None:
        """Other processes are there, which were told nothing."""
        self.stop_at = self.overshoots = 0


class Lateness(msgspec.Struct):
    """Whether a job does in time what it is about to do.

    Attributes
    ----------
    told_s
        When it was told to (``states.IN_TRANSIT``).
    late
        True if it was reported for not having done that in time.
    missed
        How often that happened since it was last suspended as told.
    """

    told_s: float = 0.0
    late: bool = False
    missed: int = 0

    def told(self, now: float) -> None:
        """It is to do something else from now on."""
        self.told_s, self.late = now, False

    def report(self) -> None:
        """It is late."""
        self.late, self.missed = True, self.missed + 1

    def parked(self) -> None:
        """It was suspended as told."""
        self.missed = 0

    def trained(self) -> None:
        """It has begun to train."""
        self.late, self.missed = False, 0


class Relocation(msgspec.Struct):
    """The way of a job to other processes: on another node, or of another number.

    Attributes
    ----------
    ending
        True while its processes are being ended because others are to be started on other nodes.
    left_s, gone_s
        When the last relocation or relaunch began, and when its processes were gone. None once it trains
        again, and if it had not trained before.
    """

    ending: bool = False
    left_s: float | None = None
    gone_s: float | None = None

    def leave_node(self, now: float, *, loses_time: bool) -> None:
        """Its processes are told to end. It ``loses_time`` if it has trained."""
        self.ending = True
        if self.left_s is None and loses_time:
            self.left_s = now

    def relaunch(self, now: float, *, loses_time: bool) -> None:
        """Its processes are told to end, so that as many are started as it is to have devices."""
        if not self.ending:
            self.left_s = now if loses_time else None
        self.ending = False

    def go_on(self, left_s: float | None, now: float) -> None:
        """Its processes are gone since ``now``, and others are started. It stands still since ``left_s``."""
        self.left_s, self.gone_s = left_s, now

    def arrived(self) -> None:
        """It trains again."""
        self.left_s = self.gone_s = None

    def renew(self) -> None:
        """Another attempt begins."""
        self.ending = False
        self.arrived()


class Verdict(msgspec.Struct):
    """How a job ended, or its last attempt did.

    Attributes
    ----------
    ended_s
        When it succeeded, failed or was cancelled. None while it has not ended.
    reason, failure
        Why it failed, the last time, or was cancelled; the class of that failure (``failures.Kind``).
    blame
        The class of a failure that the core saw before the command ended.
    """

    ended_s: float | None = None
    reason: str = ""
    failure: str = ""
    blame: Kind | None = None

    def conclude(self, reason: str, now: float, blame: Kind | None) -> None:
        """It has ended; its failure, if it is one, is judged once its processes are gone."""
        self.ended_s, self.reason, self.failure, self.blame = now, reason, "", blame

    def judge(self, failure: Failure) -> None:
        """Its failure is ``failure``."""
        self.failure, self.reason = failure.kind.value, failure.reason

    def reopen(self) -> None:
        """Another attempt begins."""
        self.ended_s = self.blame = None


class Switch(msgspec.Struct):
    """What a job's last switch was to cost and how far that may be off, if anybody knew; what it did cost."""

    predicted_s: float | None = None
    error_s: float | None = None
    cost_s: float | None = None

    def begin(self, predicted_s: float | None, error_s: float | None) -> None:
        """It is told to stop."""
        self.predicted_s, self.error_s = predicted_s, error_s

    def end(self, cost_s: float) -> None:
        """It runs again."""
        self.cost_s = cost_s
