"""Measure how fast jobs train, alone and beside others, from what their ranks report anyway.

Steps are counted between two reports between which no job came to the device or left it. Samples are counted,
too, if the training counts them. What is found is an event, so a core that is made anew from the journal
knows it. What was still being measured is lost then.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Event, Measured, Reported
from gpuslice.wire import Progress, Suspended

#: The first steps of a job are not like the others. Nor are those of an elastic job on other devices: its
#: ranks wait for new ranks.
_WARM_UP_STEPS = 3
#: The least steps and seconds of a sample, which is counted from one report to another. The first samples in
#: a company are short, so that a trial ends soon. Later ones last ``_PART`` of the time that the company has
#: lasted, up to the most.
_LEAST_STEPS = 4
_LEAST_S, _MOST_S = 0.4, 2.0
_PART = 0.25
#: The most seconds of a sample under a policy that does not pack: jobs are alone for hours.
_MOST_ALONE_S = 60.0
#: The least seconds of a sample that a suspend ends.
_REST_S = 0.2


class _Mark(NamedTuple):
    """The start of a sample: on how many devices, beside which jobs, since when, and how far the job was."""

    epoch: int
    devices: int
    beside: str
    since_s: float
    step: int
    samples: int
    at_s: float
    worked_s: float | None


class ThroughputMeter:
    """Makes ``Measured`` events from the progress that rank 0 of each measured job reports."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._marks: dict[str, _Mark] = {}
        #: The present lease of each elastic job, and the step at which the job was when it began.
        self._begun: dict[str, tuple[int, int]] = {}

    def note(self, event: Event, now: float) -> Measured | None:
        """Note an event that the core has taken. Return what has been measured with it, if anything."""
        if not isinstance(event, Reported) or event.rank:
            return None
        job, message = self._core.jobs[event.job], event.message
        if not isinstance(message, Progress | Suspended) or message.epoch != job.epoch:
            return None
        if not self._core.allocation.throughput.wanted(job):
            return None
        mark = self._marks.get(job.id)
        if isinstance(message, Suspended):
            self._marks.pop(job.id, None)
            if mark is None or mark.epoch != job.epoch or mark.samples:
                return None
            if not _enough(mark, message.step, now, _REST_S):
                return None
            return self._measured(job, mark, self._mark(job, mark, message, now))
        beside = self._beside(job)
        if beside is None or self._warms_up(job, message.step):
            self._marks.pop(job.id, None)
            return None
        goes_on = mark is not None and (mark.epoch, mark.beside) == (job.epoch, beside)
        if (
            mark is not None
            and goes_on
            and not _enough(mark, message.step, now, self._least_s(job, mark, now))
        ):
            return None
        here = self._mark(job, mark if goes_on else None, message, now, beside)
        self._marks[job.id] = here
        return None if mark is None or not goes_on else self._measured(job, mark, here)

    def _warms_up(self, job: Gang, step: int) -> bool:
        """Return True if the present steps of ``job`` are not typical yet."""
        if not job.spec.elastic:
            return step < _WARM_UP_STEPS
        epoch, first = self._begun.get(job.id, (-1, 0))
        if epoch != job.epoch:
            epoch, first = self._begun[job.id] = (job.epoch, step)
        return step < first + _WARM_UP_STEPS

    def _mark(
        self, job: Gang, before: _Mark | None, message: Progress | Suspended, now: float, beside: str = ""
    ) -> _Mark:
        """Return the mark for the progress of ``job`` now. ``before`` is its mark in the same company."""
        samples = message.samples if isinstance(message, Progress) else 0
        since_s = now if before is None else before.since_s
        return _Mark(
            job.epoch, len(job.lease), beside, since_s, message.step, samples, now, self._worked_s(job)
        )

    def _least_s(self, job: Gang, mark: _Mark, now: float) -> float:
        """Return how many seconds a sample must last at least."""
        most_s = _MOST_S if self._core.allocation.throughput.packs else _MOST_ALONE_S
        return min(most_s, max(_LEAST_S, _PART * (now - mark.since_s)))

    def _measured(self, job: Gang, mark: _Mark, here: _Mark) -> Measured:
        """Return what ``job`` did between ``mark`` and ``here``."""
        seconds = here.at_s - mark.at_s
        busy = None
        if mark.worked_s is not None and here.worked_s is not None:
            busy = max(0.0, (here.worked_s - mark.worked_s) / seconds)
        samples = max(0, here.samples - mark.samples) if mark.samples else 0
        return Measured(job.id, mark.beside, here.step - mark.step, seconds, busy, mark.devices, samples)

    def _beside(self, job: Gang) -> str | None:
        """Return the other jobs on the devices of ``job``; None while one of them comes or goes."""
        others = {
            name: other for device in job.lease for name, other in self._core.state.occupants[device].items()
        }
        others.pop(job.id, None)
        there = (job, *others.values())
        steady = all(one.state is JobState.RUNNING and one.processes.trains for one in there)
        return ",".join(sorted(others)) if steady and job.lease else None

    def _worked_s(self, job: Gang) -> float | None:
        """Return the processor time that ``job`` has used, by the cores of its slot. None on a GPU."""
        slots = sum(device.kind == "cpu" for device in self._core.devices)
        if not job.lease or self._core.devices[job.lease[0]].kind != "cpu":
            return None
        try:
            fields = (
                Path(f"/proc/{job.ranks[0].pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            )
        except OSError:
            return None
        ticks = int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK") / max(1, (os.cpu_count() or 1) // slots)


def _enough(mark: _Mark, step: int, now: float, least_s: float) -> bool:
    return step - mark.step >= _LEAST_STEPS and now - mark.at_s >= least_s
