"""Notes in the journal on why a job has waited for long: once for each reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import NamedTuple

from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.jobs.accounts import Activity
from gpuslice.sched_core.lifecycle.events import Noted

from .blockers import Blockers

#: A job is reported if one reason has lasted for so long.
LONG_S = 60.0
#: Seconds between two looks, and how many jobs each is for: a look takes a few milliseconds.
_EVERY_S, _AT_ONCE = 10.0, 100


class _Wait(NamedTuple):
    """What keeps one job from training: the case of `why`, since when, and the cases already reported."""

    case: str
    since_s: float
    told: frozenset[str]


class WaitNotes:
    """The notes on jobs that have not trained for long, made at regular looks.

    Parameters
    ----------
    core
        The core of the jobs.
    now
        Returns the time of the core's clock.
    note
        Writes an event down.
    looked
        Called after each look with the case of ``why`` of each job that does not train, by id. Empty: it was
        not looked at yet, or there is nothing to say.
    """

    def __init__(
        self,
        core: Core,
        now: Callable[[], float],
        note: Callable[[Noted], object],
        looked: Callable[[Mapping[str, str]], object] = lambda cases: None,
    ) -> None:
        self._looked = looked
        self._core = core
        self._now = now
        self._note = note
        self._next_s = 0.0
        self._waits: dict[str, _Wait] = {}
        #: The last job of the last look; the next one goes on behind it.
        self._last = -1

    def look(self) -> None:
        """Look at some jobs if it is time, and note those that one reason has kept from training for long."""
        now = self._now()
        if now < self._next_s:
            return
        self._next_s = now + _EVERY_S
        waiting = [job for job in self._core.jobs.values() if not job.state.ended]
        waiting = [job for job in waiting if not (job.activity is Activity.TRAINS and job.processes.trains)]
        self._waits = {job.id: self._waits[job.id] for job in waiting if job.id in self._waits}
        behind = [job for job in waiting if job.number > self._last]
        blockers = Blockers(self._core, now)
        notes: list[Noted] = []
        for job in islice([*behind, *waiting[: len(waiting) - len(behind)]], _AT_ONCE):
            self._last = job.number
            if (found := blockers.explain(job)) is not None:
                notes += self._noted(job.id, *found, now)
        self._looked({job.id: self._waits[job.id].case if job.id in self._waits else "" for job in waiting})
        for note in notes:
            self._note(note)

    def _noted(self, job: str, case: str, sentence: str, now: float) -> list[Noted]:
        """Return the note on ``job`` that is due, if any, and remember what keeps the job."""
        wait = self._waits.get(job, _Wait("", now, frozenset()))
        if wait.case != case:
            wait = _Wait(case, now, wait.told)
        long = now - wait.since_s >= LONG_S and case not in wait.told
        self._waits[job] = wait._replace(told=wait.told | {case}) if long else wait
        return [Noted("waits", job, {"why": sentence})] if long else []
