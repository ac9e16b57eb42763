"""SLAQ: devices go where the loss falls most (Zhang et al., SoCC 2017)."""

from __future__ import annotations

from gpuslice.sched_core.job import Job
from gpuslice.sched_core.policy import View

from .marginal import MarginalPolicy, Urgency


class Slaq(MarginalPolicy):
    """Largest predicted decrease of the loss per device over the next interval (section 4).

    Losses of different jobs are compared as shares of each job's largest decrease so far. Jobs without a
    curve yet come first: they learn fastest. docs/policies.md says where this is not as in the paper.

    Parameters
    ----------
    interval_s
        Time between two allocations, and how far ahead losses are predicted.
    """

    name = "slaq"

    def __init__(self, *, interval_s: float = 600.0) -> None:
        super().__init__(interval_s)

    def urgency(self, job: Job, have: int, get: int, view: View) -> Urgency:
        history = self.losses[job.id]
        curve = history.curve()
        if curve is None or history.drop <= 0:
            return (0.0 if not have else 1.0, float(job.number))
        now_s, speed = job.progress_at(view.now_s), self.speeds[job.id]
        gained = [
            curve.at(now_s) - curve.at(now_s + self.interval_s * (speed.rate(n, job.demand) if n else 0.0))
            for n in (have, get)
        ]
        return (0.5, -(gained[1] - gained[0]) / history.drop / (get - have))
