"""Finish-time fairness of apps: jobs that search for one model together (Themis, NSDI 2020, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .outcome import Outcome

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class App:
    """One app.

    Attributes
    ----------
    jobs
        How many it has.
    submit_s, end_s
        Its first submission, and when the last of its jobs had ended or was stopped.
    rho, rho_paper
        T_sh / T_id, dynamic, see ``apps_of``.
    """

    name: str
    jobs: int
    submit_s: float
    end_s: float
    rho: float
    rho_paper: float


def apps_of(outcome: Outcome) -> list[App]:
    """Return the apps whose jobs have all ended, in order of first submission.

    Return none if the trace names no app.

    T_sh is the life of the app. T_id is how long it would take at least on a 1/N share of the cluster, until
    its longest job is done and all its work; N is the average number of unfinished apps during its life. Of a
    job that the policy stopped only what it did counts. The paper's T_id is N times the time that it would
    take at least on the whole cluster. A job without an app is an app of its own, whose ρ is that of
    ``metrics.finish_time_fairness`` if there are no others. Apps that take no time are left out.
    """
    names = outcome.trace.extras.get("app", ())
    if not any(names):
        return []
    members: dict[tuple[str, int], list[int]] = {}
    for job, name in enumerate(names):
        members.setdefault((name, -1) if name else (outcome.trace.ids[job], job), []).append(job)
    submit_s = np.array(outcome.trace.submit_s)
    lives = np.array([(submit_s[jobs].min(), outcome.finish_s[jobs].max()) for jobs in members.values()])
    crowds = _average_crowd(lives[:, 0], lives[:, 1])
    found: list[App] = []
    for ((name, _), jobs), (begin_s, end_s), crowd in zip(members.items(), lives, crowds, strict=True):
        crowd = max(1.0, crowd)
        alone_s = _alone_s(outcome, jobs, outcome.devices / crowd)
        times_n_s = _alone_s(outcome, jobs, outcome.devices) * crowd
        if alone_s > 0 and not np.isnan(end_s):
            life_s = float(end_s - begin_s)
            found.append(
                App(name, len(jobs), float(begin_s), float(end_s), life_s / alone_s, life_s / times_n_s)
            )
    return found


def _alone_s(outcome: Outcome, jobs: Sequence[int], share: float) -> float:
    """Return the least time that ``jobs`` take on ``share`` devices."""
    trace, longest_s, work = outcome.trace, 0.0, 0.0
    begin_s = trace.submit_s[jobs[0]]
    for job in jobs:
        needed_s = float(outcome.executed_s[job]) if outcome.stopped[job] else trace.duration_s[job]
        slowed_s = needed_s * max(1.0, trace.demand[job] / share)
        longest_s = max(longest_s, trace.submit_s[job] - begin_s + slowed_s)
        work += needed_s * trace.demand[job]
    return max(longest_s, work / share)


def _average_crowd(begin_s: Column, end_s: Column) -> Column:
    """Return for each life how many lives there are on average while it lasts.

    A life that never ends does not count as ending.
    """
    begins, ends = np.sort(begin_s), np.sort(end_s[~np.isnan(end_s)])

    def passed_s(moment_s: Column) -> Column:
        """Return, for each moment, the seconds that all have lived until then, together."""
        born, dead = np.searchsorted(begins, moment_s), np.searchsorted(ends, moment_s)
        lived: Column = moment_s * (born - dead) - _sums(begins)[born] + _sums(ends)[dead]
        return lived

    life_s = end_s - begin_s
    crowd: Column = (passed_s(end_s) - passed_s(begin_s)) / np.where(life_s > 0, life_s, np.nan)
    return np.where(np.isnan(crowd), 1.0, crowd)


def _sums(values: Column) -> Column:
    return np.concatenate(([0.0], np.cumsum(values)))
