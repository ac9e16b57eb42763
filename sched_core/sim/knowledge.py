"""What a trace tells policies of running times."""

from __future__ import annotations

from collections.abc import Sequence

from gpuslice.sched_core.job import Job
from gpuslice.sched_core.knowledge import NoKnowledge
from gpuslice.sched_core.traces.trace import Trace


class TraceDistribution(NoKnowledge):
    """The knowledge of a policy that knows the distribution of service, but no single job's duration."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def services(self) -> Sequence[float]:
        return [
            demand * duration_s
            for demand, duration_s in zip(self._trace.demand, self._trace.duration_s, strict=True)
        ]


class TraceKnowledge(TraceDistribution):
    """The knowledge of a policy that knows everything the trace states."""

    def duration_s(self, job: Job) -> float | None:
        return self._trace.duration_s[job.number]
