"""Training losses in a simulation: traces state none, so every job gets a curve of a usual shape."""

from __future__ import annotations

from zlib import crc32

from gpuslice.sched_core.job import Job
from gpuslice.sched_core.traces.trace import Trace

#: At its end a job has come down from 1 to its floor but for 1 / (1 + _STEEPNESS) of the way.
_STEEPNESS = 9.0
_HIGHEST_FLOOR = 0.5


class TraceLosses:
    """Losses 1/(β₀x + β₁) + β₂ of the share x of work done: the family of Optimus (EuroSys 2018).

    The floor that a job's loss tends to follows from its name alone, between 0 and 0.5: some jobs of one
    search become better models than others, and every run agrees on which.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def loss(self, job: Job, now_s: float) -> float | None:
        duration_s = self._trace.duration_s[job.number]
        done = min(1.0, job.progress_at(now_s) / duration_s) if duration_s > 0 else 1.0
        floor = _HIGHEST_FLOOR * (crc32(job.id.encode()) % 1000) / 1000
        return floor + (1.0 - floor) / (1.0 + _STEEPNESS * done)
