"""Optimus: devices go where they shorten the remaining time most (Peng et al., EuroSys 2018)."""

from __future__ import annotations

from gpuslice.errors import ConfigError
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.policy import View

from .marginal import MarginalPolicy, Urgency


class Optimus(MarginalPolicy):
    """Marginal gain on estimates made while jobs run (section 4.1).

    The work left of a job comes from its loss curve, its speed on other numbers of devices from a speed
    curve. First every job gets its least number of devices, shortest remaining service first; then, one by
    one, devices go to the job whose remaining time falls most.

    Parameters
    ----------
    interval_s
        Time between two allocations (section 5: 10 minutes).
    converged
        A job is expected to end when its loss has come down to this share of its height above its floor.
    newcomer_s
        Work assumed of a job that has no loss curve yet.
    """

    name = "optimus"

    def __init__(
        self, *, interval_s: float = 600.0, converged: float = 0.1, newcomer_s: float = 3600.0
    ) -> None:
        super().__init__(interval_s)
        if not 0 < converged < 1 or not newcomer_s > 0:
            raise ConfigError(
                f"converged={converged}, newcomer_s={newcomer_s} are not possible",
                "0 < converged < 1 and newcomer_s > 0",
            )
        self._converged = converged
        self._newcomer_s = newcomer_s

    def left_s(self, job: Job, view: View) -> float:
        """Return the expected remaining work, in seconds of a dedicated run."""
        curve = self.losses[job.id].curve()
        if curve is None:
            return self._newcomer_s
        # Past its expected end a job is still assumed to need a little: it did not end.
        return max(curve.ends_at_s(self._converged) - job.progress_at(view.now_s), 1.0)

    def urgency(self, job: Job, have: int, get: int, view: View) -> Urgency:
        left_s, speed = self.left_s(job, view), self.speeds[job.id]
        then_s = left_s / speed.rate(get, job.demand)
        if not have:
            return (0.0, then_s * get)
        return (1.0, then_s - left_s / speed.rate(have, job.demand))
