"""The time of a live job, added up by what the job did: it waited, switched, set up or trained.

Only leases that the job has held count, never plans. A job that is to leave its devices and does not goes on
to attain service. A job that is to have devices and cannot enter them waits. A job does one thing at a time,
so the sums of all activities are its age.

Time is added up only when a job goes from one activity to another. The journal has every event at which that
happens, whereas it leaves out heartbeats. So a replayed journal gives the same sums to the last bit.
"""

from __future__ import annotations

from enum import Enum
from math import inf

import msgspec

from gpuslice.sched_core.job import Job, JobSpec

#: Set-up beyond this counts as attained service: a job that never trains must not keep its devices for ever.
SETUP_AT_MOST_S = 300.0


class Activity(Enum):
    """The activities of a job that its time is divided into."""

    WAITS = "waits"  # it has no devices
    HELD = "held"  # it has no devices, because its owner holds it, or it may not start yet
    SWITCHES = "switches"  # it has devices, and not all of its ranks are on them
    SETS_UP = "sets up"  # its ranks are on its devices, and this training has not reached its first boundary
    TRAINS = "trains"  # it trains, or keeps its devices between two trainings
    ENDED = "ended"


#: The activities of a job that has devices.
_ON_DEVICES = frozenset({Activity.SWITCHES, Activity.SETS_UP, Activity.TRAINS})


class Stretch(msgspec.Struct, frozen=True):
    """A job's present activity: since when, on how many devices, and how fast the job makes progress."""

    activity: Activity
    since_s: float
    devices: int = 0
    rate: float = 1.0


class AccountedJob(Job):
    """A job whose attained service is the device time that it has had, not what was planned for it.

    Attributes
    ----------
    stretch
        Its present activity, and since when.
    waited_s, held_s, switching_s, setup_s
        Seconds up to the present stretch: without devices; likewise because its owner held it or it might not
        start yet; on devices while it came, left or ended; on devices before the first boundary of a
        training. With ``executed_s`` they are its age.
    not_counted_s
        Time on its devices that does not count towards its time limit.
    """

    __slots__ = (
        "_training_setup_s",
        "held_s",
        "not_counted_s",
        "setup_s",
        "stretch",
        "switching_s",
        "waited_s",
    )

    def __init__(self, spec: JobSpec, number: int) -> None:
        super().__init__(spec, number)
        self.stretch = Stretch(Activity.WAITS, spec.submit_s)
        self.not_counted_s = 0.0
        self.waited_s = self.held_s = self.switching_s = self.setup_s = 0.0
        #: Seconds of set-up of the present training, up to the present stretch.
        self._training_setup_s = 0.0

    def account(self, activity: Activity, now: float, devices: int) -> None:
        """Add up the present stretch and begin another, if ``activity`` or the number of devices has changed.

        Only this, ``change_rate`` and ``begin_setup`` change the sums.
        """
        now, devices = max(now, self.stretch.since_s), devices if activity in _ON_DEVICES else 0
        if (activity, devices) != (self.stretch.activity, self.stretch.devices):
            self._book(now)
            self.stretch = Stretch(activity, now, devices, self.rate)

    def change_rate(self, rate: float, now: float) -> None:
        """Set the progress per second to ``rate`` from now on, after adding up the stretch until now."""
        if rate != self.rate:
            self._book(now)
            self.rate = rate
            self.stretch = Stretch(self.stretch.activity, now, self.stretch.devices, rate)

    def begin_setup(self, now: float) -> None:
        """Count set-up time from 0 again: another training begins now."""
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
        else:  # it switched; or it had ended, and was about to begin again
            self.switching_s += rest_s

    def _trained_s(self, now_s: float) -> float:
        """Return how many seconds of the present stretch count as training, up to ``now_s``."""
        return max(0.0, now_s - self._counts_since_s) if now_s < inf else 0.0

    @property
    def _counts_since_s(self) -> float:
        """The moment from which the present stretch counts as training; infinite if it does not."""
        if self.stretch.activity is Activity.TRAINS:
            return self.stretch.since_s
        if self.stretch.activity is Activity.SETS_UP:
            return self.stretch.since_s + SETUP_AT_MOST_S - self._training_setup_s
        return inf

    def counts_from(self, now: float) -> float:
        """Return from when time on the devices counts as training; infinite while the job is not on them."""
        return max(now, self._counts_since_s)

    def counts(self, now: float) -> bool:
        """Return True if the job's time counts as training at ``now``."""
        return self._counts_since_s <= now

    def has_had_devices_s(self, seconds: float) -> float:
        """Return when it will have been on its devices for ``seconds``; infinite while it is not on them.

        Time before its owner had it started again (``requeue``) does not count.
        """
        if self.stretch.activity not in (Activity.SETS_UP, Activity.TRAINS):
            return inf
        return self.stretch.since_s + seconds + self.not_counted_s - (self.executed_s + self.setup_s)

    def count_devices_anew(self) -> None:
        """Count the time on its devices for ``has_had_devices_s`` from 0 again. It has no devices now."""
        self.not_counted_s = self.executed_s + self.setup_s

    @property
    def setup_since_s(self) -> float | None:
        """When the set-up began, less its breaks; None while the job does not set up."""
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
        """Return the seconds, up to ``now_s``, without devices though it might have had some."""
        return self.waited_s + self._spent_s(Activity.WAITS, now_s)

    def held_at(self, now_s: float) -> float:
        """Return the seconds, up to ``now_s``, in which its owner held it, or it might not start yet."""
        return self.held_s + self._spent_s(Activity.HELD, now_s)

    def switching_at(self, now_s: float) -> float:
        """Return the seconds, up to ``now_s``, of coming to its devices, leaving them or ending on them."""
        return self.switching_s + self._spent_s(Activity.SWITCHES, now_s)

    def setup_at(self, now_s: float) -> float:
        """Return the seconds, up to ``now_s``, on its devices before it trained: imports, data, models.

        That is not attained service, which is time in which it trains (Tiresias, section 3.2.1), unless it
        takes longer than ``SETUP_AT_MOST_S``.
        """
        return self.setup_s + self._spent_s(Activity.SETS_UP, now_s)

    def _spent_s(self, activity: Activity, now_s: float) -> float:
        """Return the seconds that the present stretch adds to ``activity``, time of training excluded."""
        if self.stretch.activity is not activity:
            return 0.0
        return max(0.0, now_s - self.stretch.since_s) - self._trained_s(now_s)
