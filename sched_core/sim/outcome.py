"""What a simulation found out, job by job: columns in order of submission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpuslice.sched_core.traces.trace import Trace

from .spans import Spans

Column = NDArray[np.float64]


@dataclass(slots=True)
class Outcome:
    """The result of one simulation; index ``i`` is job ``i`` of ``trace``, shape ``(jobs,)`` each.

    Attributes
    ----------
    first_start_s, finish_s
        NaN if it did not happen.
    stopped
        Ended by the policy before its time.
    service_s
        Work done, in device-seconds of a dedicated run.
    busy_s, lost_s
        Device-seconds held in making progress, and without any because of switching; of a device that n jobs
        share each holds 1/n.
    switching_s
        Time without progress on devices, because of switching.
    fair_share_s, fragmented_s
        Parts of the waiting time (``wait_reasons``).
    contention
        Average number of unfinished jobs during the job's life.
    counters
        What the policy counted of its own work, such as how often its solver was of no use.
    solver
        Name and version of the solver that the policy used; empty: none.
    spans
        Who held what when, in order of the spans' ends; empty unless asked for.
    complete
        False if the run was interrupted.
    """

    trace: Trace
    cluster: str
    devices: int
    policy: str
    first_start_s: Column
    finish_s: Column
    stopped: NDArray[np.bool_]
    preemptions: NDArray[np.int64]
    migrations: NDArray[np.int64]
    executed_s: Column
    service_s: Column
    busy_s: Column
    lost_s: Column
    switching_s: Column
    fair_share_s: Column
    fragmented_s: Column
    contention: Column
    promotions: Mapping[int, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    solver: str = ""
    spans: Spans = field(default_factory=Spans)
    events: int = 0
    wall_s: float = 0.0
    complete: bool = True

    @classmethod
    def empty(cls, trace: Trace, cluster: str, devices: int, policy: str) -> Outcome:
        """Return columns for every job of ``trace`` in which nothing is known yet."""
        jobs = len(trace)
        return cls(
            trace=trace,
            cluster=cluster,
            devices=devices,
            policy=policy,
            first_start_s=np.full(jobs, np.nan),
            finish_s=np.full(jobs, np.nan),
            stopped=np.zeros(jobs, dtype=np.bool_),
            preemptions=np.zeros(jobs, dtype=np.int64),
            migrations=np.zeros(jobs, dtype=np.int64),
            executed_s=np.zeros(jobs),
            service_s=np.zeros(jobs),
            busy_s=np.zeros(jobs),
            lost_s=np.zeros(jobs),
            switching_s=np.zeros(jobs),
            fair_share_s=np.zeros(jobs),
            fragmented_s=np.zeros(jobs),
            contention=np.zeros(jobs),
        )
