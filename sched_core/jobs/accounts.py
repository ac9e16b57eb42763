"""What a live job's time has gone to: by the leases it has held and what its ranks did under them.

Nothing is booked ahead, and nothing of a plan: a job that is to leave its devices, and does not, goes on to
attain service; one that is to have some, and cannot enter, waits. A job does one thing at a time, so the sums
of all that it has done are its age.

Time is added up only when a job goes from one activity to another. All such moments are events that a journal
has, whereas it leaves out heartbeats. So a replayed journal gives the same sums to the last bit.
"""

from __future__ import annotations

from enum import Enum
from math import inf

import msgspec

from gpuslice.sched_core.job import Job, JobSpec

#: Set-up beyond this counts as attained service, or a job that never trains could keep its devices for ever.
SETUP_AT_MOST_S = 300.0


class Activity(Enum):
    """What a job does, as far as its time is concerned."""

    WAITS = "waits"  # it has no devices
    HELD = "held"  # nor has it any, and its owner keeps it from having some
    SWITCHES = "switches"  # it has devices, and not all of its ranks are on them
    SETS_UP = "sets up"  # they are on them, and this training has not reached its first boundary
    TRAINS = "trains"  # or keeps its devices between two trainings
    ENDED = "ended"


#: What a job does while it has devices.
_ON_DEVICES = frozenset({Activity.SWITCHES, Activity.SETS_UP, Activity.TRAINS})


class Stretch(msgspec.Struct, frozen=True):
    """What a job does now, since when, on how many devices, and its progress per second there."""

    activity: Activity
    since_s: float
    devices: int = 0
    rate: float = 1.0


class AccountedJob(Job):
    """A job whose attained service is what it has had, not what was planned for it.

    Attributes
    ----------
    stretch
        What it does now.
    waited_s, held_s, switching_s, setup_s
        Time without devices, the same while its owner held it, time on devices in which it came, left
        or ended, and time on devices before the first boundary of a training, all up to the present stretch.
        With ``executed_s`` they are its age.
    """

    __slots__ = ("_training_setup_s", "held_s", "setup_s", "stretch", "switching_s", "waited_s")

    def __init__(self, spec: JobSpec, number: int) -> None:
        super().__init__(spec, number)
        self.stretch = Stretch(Activity.WAITS, spec.submit_s)
        self.waited_s = self.held_s = self.switching_s = self.setup_s = 0.0
        #: Set-up of the present training, up to the present stretch.
        self._training_setup_s = 0.0

    def account(self, activity: Activity, now: float, devices: int) -> None:
        """Do ``activity`` from now on, with so many devices if any; book what it has done until now.

        This and ``change_rate`` are all that changes the sums.
        """
        now, devices = max(now, self.stretch.since_s), devices if activity in _ON_DEVICES else 0
        if (activity, devices) != (self.stretch.activity, self.stretch.devices):
            self._book(now)
            self.stretch = Stretch(activity, now, devices, self.rate)

    def change_rate(self, rate: float, now: float) -> None:
        """Make ``rate`` seconds of progress per second from now on."""
        if rate != self.rate:
            self._book(now)
            self.rate = rate
            self.stretch = Stretch(self.stretch.activity, now, self.stretch.devices, rate)

    def begin_setup(self, now: float) -> None:
        """Count set-up anew from now on: what follows is another training."""
        if self.stretch.activity is Activity.SETS_UP:
            self._book(now)
            self.stretch = Stretch(Activity.SETS_UP, now, self.stretch.devices, self.rate)
        self._training_setup_s = 0.0

    def _book(self, now: float) -> None:
        then = self.stretch
        trained_s = self._trained_s(now)
        self.executed_s += trained_s
        self.service_s += trained_s * then.devices
        self.progress_s += trained_s * then.rate
        rest_s = now - then.since_s - trained_s
        if then.activity is Activity.WAITS:
            self.waited_s += rest_s
        elif then.activity is Activity.HELD:
            self.held_s += rest_s
        elif then.activity is Activity.SETS_UP:
            self.setup_s += rest_s
            self._training_setup_s += rest_s
        else:  # one that had ended, and has not, was about to begin again
            self.switching_s += rest_s

    def _trained_s(self, now_s: float) -> float:
        """How much of the present stretch counts as training, up to ``now_s``."""
        return max(0.0, now_s - self._counts_since_s) if now_s < inf else 0.0

    @property
    def _counts_since_s(self) -> float:
        """Since when its present stretch counts as training; infinite if it does not."""
        if self.stretch.activity is Activity.TRAINS:
            return self.stretch.since_s
        if self.stretch.activity is Activity.SETS_UP:
            return self.stretch.since_s + SETUP_AT_MOST_S - self._training_setup_s
        return inf

    def counts_from(self, now: float) -> float:
        """Since when time on its devices counts, or will; infinite as long as it is not on them."""
        return max(now, self._counts_since_s)

    def counts(self, now: float) -> bool:
        """Return True if its time counts at this moment."""
        return self._counts_since_s <= now

    @property
    def setup_since_s(self) -> float | None:
        """Since when it would have set up, if without a break; None while it does not."""
        if self.stretch.activity is not Activity.SETS_UP:
            return None
        return self.stretch.since_s - self._training_setup_s

    def executed_at(self, now_s: float) -> float:
        return self.executed_s + self._trained_s(now_s)

    def service_at(self, now_s: float) -> float:
        return self.service_s + self._trained_s(now_s) * self.stretch.devices

    def progress_at(self, now_s: float) -> float:
        return self.progress_s + self._trained_s(now_s) * self.stretch.rate

    def without_devices_at(self, now_s: float) -> float:
        """How long it has had no devices though its owner let it, since it was submitted, up to ``now_s``."""
        return self.waited_s + self._spent_s(Activity.WAITS, now_s)

    def held_at(self, now_s: float) -> float:
        """How long it has had no devices because its owner held it, up to ``now_s``."""
        return self.held_s + self._spent_s(Activity.HELD, now_s)

    def switching_at(self, now_s: float) -> float:
        """How long it has come to its devices, left them or ended on them, up to ``now_s``."""
        return self.switching_s + self._spent_s(Activity.SWITCHES, now_s)

    def setup_at(self, now_s: float) -> float:
        """How long it has been on its devices without training, up to ``now_s``: imports, data, models.

        That is not attained service, which is time in which it trains (Tiresias, section 3.2.1), unless it
        takes longer than ``SETUP_AT_MOST_S``.
        """
        return self.setup_s + self._spent_s(Activity.SETS_UP, now_s)

    def _spent_s(self, activity: Activity, now_s: float) -> float:
        """What the present stretch adds to ``activity``, up to ``now_s``."""
        if self.stretch.activity is not activity:
            return 0.0
        return max(0.0, now_s - self.stretch.since_s) - self._trained_s(now_s)
