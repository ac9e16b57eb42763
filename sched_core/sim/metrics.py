"""What is reported of a simulation. Definitions and keys: docs/json.md."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .apps import apps_of
from .outcome import Outcome

Column = NDArray[np.float64]
QUANTILES = (50, 90, 95, 99)


def summary(outcome: Outcome) -> dict[str, Any]:
    """Return numbers about all jobs that ended by themselves. Values are None where there are none."""
    done = ~np.isnan(outcome.finish_s) & ~outcome.stopped
    submit_s, duration_s = np.array(outcome.trace.submit_s), np.array(outcome.trace.duration_s)
    jct_s = outcome.finish_s - submit_s
    queueing_s = np.maximum(0.0, jct_s - outcome.executed_s - outcome.switching_s)
    rho = finish_time_fairness(outcome)
    apps = apps_of(outcome)
    rho_apps = np.array([app.rho for app in apps])
    ended = outcome.finish_s[~np.isnan(outcome.finish_s)]
    makespan_s = float(ended.max() - submit_s.min()) if ended.size else None
    available = outcome.devices * makespan_s if makespan_s else None
    strict, soft, deadlines = deadline_misses(outcome)
    best_effort = np.array([not own for own in outcome.trace.extras.get("deadlines", [()] * len(done))])
    return {
        "policy": outcome.policy,
        "cluster": outcome.cluster,
        "trace": outcome.trace.name,
        "complete": outcome.complete,
        "jobs": len(outcome.trace),
        "jobs_done": int(done.sum()),
        "jobs_stopped": int(outcome.stopped.sum()),
        "events": outcome.events,
        "jct_s": spread(jct_s[done]),
        "jct_best_effort_s": spread(jct_s[done & best_effort]),
        "first_start_s": spread(outcome.first_start_s - submit_s),
        "queueing_s": spread(queueing_s[done]),
        "queueing_fair_share_s": spread(outcome.fair_share_s[done]),
        "queueing_fragmentation_s": spread(outcome.fragmented_s[done]),
        "queueing_turns_s": spread(
            np.maximum(0.0, queueing_s - outcome.fair_share_s - outcome.fragmented_s)[done]
        ),
        "slowdown": spread((jct_s / np.where(duration_s > 0, duration_s, np.nan))[done & (duration_s > 0)]),
        "makespan_s": makespan_s,
        "utilization": float(outcome.busy_s.sum() / available) if available else None,
        "held": float((outcome.busy_s + outcome.lost_s).sum() / available) if available else None,
        "preemptions": int(outcome.preemptions.sum()),
        "migrations": int(outcome.migrations.sum()),
        "promotions": sum(outcome.promotions.values()),
        "policy_counters": dict(outcome.counters),
        "solver": outcome.solver or None,
        "lost_device_s": float(outcome.lost_s.sum()),
        "rho": spread(rho[done]),
        "jain": jain(1.0 / rho[done]) if done.any() else None,
        "rho_paper": spread(finish_time_fairness(outcome, times_n=True)[done]),
        "rho_apps": spread(rho_apps),
        "jain_apps": jain(1.0 / rho_apps) if rho_apps.size else None,
        "rho_apps_paper": spread(np.array([app.rho_paper for app in apps])),
        "deadlines": deadlines,
        "deadline_misses": strict,
        "deadline_misses_soft": soft,
    }


def spread(values: Column) -> dict[str, float] | None:
    """Return mean, extremes and quantiles (linear interpolation). Return None for no values."""
    values = values[~np.isnan(values)]
    if not values.size:
        return None
    quantiles = np.percentile(values, QUANTILES)
    names = ("median", "p90", "p95", "p99")
    return {
        "mean": float(values.mean()),
        "min": float(values.min()),
        "max": float(values.max()),
        **{name: float(value) for name, value in zip(names, quantiles, strict=True)},
    }


def finish_time_fairness(outcome: Outcome, *, times_n: bool = False) -> Column:
    """Return ρ of each job, dynamic: T_sh / T_id (Themis, section 2).

    T_id is the job's duration on a 1/N share of the cluster, N being the average number of unfinished jobs
    during its life; a share of at least what the job asks for does not slow it down, a smaller one linearly.
    With ``times_n`` it is N times the duration on the whole cluster, as the paper has it: the same for jobs
    that can use every device, and more for all others, whose rho is smaller therefore.
    NaN for jobs that take no time: whatever they wait is infinitely more.
    """
    shared_s = outcome.finish_s - np.array(outcome.trace.submit_s)
    crowd = np.maximum(1.0, outcome.contention)
    duration_s, demand = np.array(outcome.trace.duration_s), np.array(outcome.trace.demand)
    if times_n:
        alone_s = crowd * duration_s * np.maximum(1.0, demand / outcome.devices)
    else:
        alone_s = duration_s * np.maximum(1.0, demand / (outcome.devices / crowd))
    rho: Column = shared_s / np.where(alone_s > 0, alone_s, np.nan)
    return rho


def jain(values: Column) -> float | None:
    """Return Jain's index (sum x)^2 / (n * sum x^2): 1 if all are equal, 1/n if one has everything."""
    values = values[np.isfinite(values)]
    squares = float((values**2).sum())
    return float(values.sum()) ** 2 / (values.size * squares) if squares > 0 else None


def deadline_misses(outcome: Outcome) -> tuple[int, int, int]:
    """Return how many jobs missed their first deadline, their last one, and how many have any.

    Of a job that has not ended, which only an interrupted run has, nothing is known.
    """
    columns = outcome.trace.extras.get("deadlines", ())
    strict = soft = total = 0
    for index, deadlines in enumerate(columns):
        if not deadlines:
            continue
        total += 1
        took_s = outcome.finish_s[index] - outcome.trace.submit_s[index]
        if np.isnan(took_s):
            continue
        in_time = not outcome.stopped[index]
        strict += not (in_time and took_s <= deadlines[0][0])
        soft += not (in_time and took_s <= deadlines[-1][0])
    return strict, soft, total
