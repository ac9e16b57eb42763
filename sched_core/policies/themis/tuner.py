"""A hyper-parameter tuner in small: which jobs of an app are ended early.

Source: Themis (NSDI 2020), section 4.3 (apps bring their own); halving: Jamieson and Talwalkar, 2016.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from gpuslice.errors import ConfigError
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.policy import View

from .agent import Goal

TunerKind = Literal["none", "first", "halving"]


class Tuner:
    """Ends jobs of an app: the rest with the first that succeeds, or the worse half at every rung.

    Parameters
    ----------
    kind
        ``none``, ``first`` or ``halving``.
    rung_s
        Progress at the first rung, in seconds; doubles from rung to rung.
    """

    def __init__(self, kind: TunerKind, rung_s: float) -> None:
        if not rung_s > 0:
            raise ConfigError(f"rung_s={rung_s} is not a time", "give a positive number of seconds")
        self.goal: Goal = "all" if kind == "none" else "first"
        #: Whether it must look at jobs now and then.
        self.watches = kind == "halving"
        self._first_rung_s = rung_s
        self._rung_s: dict[str, float] = {}

    def succeeded(self, rest: Iterable[Job]) -> list[Job]:
        """Return the jobs of the ``rest`` to stop after a job of their app ended well."""
        return list(rest) if self.goal == "first" else []

    def worse_half(self, app: str, jobs: Sequence[Job], view: View) -> list[Job]:
        """Return the jobs to stop once every job of ``app`` has reached the rung.

        Jobs without a known loss stay.
        """
        if not self.watches or len(jobs) < 2:
            return []
        rung_s = self._rung_s.get(app, self._first_rung_s)
        if any(job.progress_at(view.now_s) < rung_s for job in jobs):
            return []
        self._rung_s[app] = 2 * rung_s
        judged = [(loss, job.number, job) for job in jobs if (loss := view.loss(job)) is not None]
        judged.sort()
        return [job for _, _, job in judged[(len(judged) + 1) // 2 :]]

    def forget(self, app: str) -> None:
        """Remove ``app``, which is over."""
        self._rung_s.pop(app, None)
