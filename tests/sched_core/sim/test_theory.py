"""Long random traces against the answers of queueing theory.

Tolerances are several standard errors of the estimate, which is computed from batches of the same run; the
seeds are fixed, so nothing here depends on luck or on the machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import factorial, sqrt

import numpy as np
import pytest

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.traces.trace import Trace

Draw = Callable[[random.Random], float]
LOAD = 0.7


def exponential(draw: random.Random) -> float:
    return draw.expovariate(1.0)


def constant(draw: random.Random) -> float:
    return 1.0


def two_sizes(draw: random.Random) -> float:
    """Mean 1, second moment 10: many short jobs, a few of 9.11."""
    return 0.1 if draw.random() < 0.9 else 9.1


def halves(draw: random.Random) -> float:
    """Mean 1, second moment 1.25."""
    return draw.choice([0.5, 1.5])


SECOND_MOMENT: dict[Draw, float] = {
    exponential: 2.0,
    constant: 1.0,
    two_sizes: 0.9 * 0.1**2 + 0.1 * 9.1**2,
}


def run(
    service: Draw, policy: str, *, jobs: int, devices: int = 1, seed: int = 1, **options: float
) -> Outcome:
    """Poisson arrivals at ``LOAD`` of the devices, one device per job."""
    draw = random.Random(seed)
    now_s, submit_s, duration_s = 0.0, [], []
    for _ in range(jobs):
        now_s += draw.expovariate(LOAD * devices)
        submit_s.append(now_s)
        duration_s.append(service(draw))
    trace = Trace([str(i) for i in range(jobs)], submit_s, [1] * jobs, duration_s)
    return Simulation(trace, Cluster([devices]), make_policy(policy, options)).run()


def jct_s(outcome: Outcome) -> np.ndarray:
    return outcome.finish_s - np.array(outcome.trace.submit_s)


def agrees(values: np.ndarray, theory: float, *, within: float = 4.0, most: float = 0.1) -> None:
    """The mean is within so many standard errors, and those are small enough to mean something."""
    means = values[: len(values) // 30 * 30].reshape(30, -1).mean(axis=1)
    error = float(means.std(ddof=1)) / sqrt(30)
    assert error < most * theory
    assert values.mean() == pytest.approx(theory, abs=within * error)


@pytest.mark.parametrize("service", [exponential, constant, two_sizes])
def test_first_come_first_served_waits_as_pollaczek_and_khinchine_say(service: Draw) -> None:
    """M/G/1: mean wait λ E[S²] / (2 (1 − ρ))."""
    outcome = run(service, "fifo", jobs=8_000)
    wait_s = jct_s(outcome) - np.array(outcome.trace.duration_s)
    agrees(wait_s, LOAD * SECOND_MOMENT[service] / (2 * (1 - LOAD)))


def test_several_devices_wait_as_erlang_says() -> None:
    """M/M/c: P(wait) by Erlang's C formula, mean wait P / (c μ − λ)."""
    devices = 4
    offered = LOAD * devices
    last = offered**devices / factorial(devices) / (1 - LOAD)
    chance = last / (sum(offered**k / factorial(k) for k in range(devices)) + last)
    outcome = run(exponential, "fifo", jobs=8_000, devices=devices)
    wait_s = jct_s(outcome) - np.array(outcome.trace.duration_s)
    agrees((wait_s > 1e-9).astype(float), chance)
    agrees(wait_s, chance / (devices - offered))


@pytest.mark.parametrize("service", [exponential, constant])
def test_ever_shorter_turns_share_the_device(service: Draw) -> None:
    """M/G/1 processor sharing: mean JCT E[S] / (1 − ρ), whatever the distribution of S."""
    agrees(jct_s(run(service, "rr", jobs=3_000, quantum_s=0.1)), 1 / (1 - LOAD), most=0.15)


@pytest.mark.slow
def test_least_attained_service_is_foreground_background() -> None:
    """M/G/1 with sizes 0.5 and 1.5. Short jobs wait for parts of 0.5 only; long ones for everybody.

    FB (Kleinrock II, section 4.6): T(x) = (W(x) + x) / (1 − ρ(x)), W(x) = λ E[min(S, x)²] / (2 (1 − ρ(x))),
    ρ(x) = λ E[min(S, x)].
    """
    outcome = run(halves, "las", jobs=5_000, quantum_s=0.05)
    took_s, duration_s = jct_s(outcome), np.array(outcome.trace.duration_s)
    short, load = 0.5, LOAD * 0.5
    theory_s = (LOAD * short**2 / (2 * (1 - load)) + short) / (1 - load)
    # Turns are not endlessly short.
    assert took_s[duration_s == short].mean() == pytest.approx(theory_s, rel=0.1)
    long_s = (LOAD * 1.25 / (2 * (1 - LOAD)) + 1.5) / (1 - LOAD)
    agrees(took_s[duration_s > 1], long_s, most=0.15)


def test_shortest_remaining_time_first_beats_all_others_by_as_much_as_theory_says() -> None:
    """SRPT with two sizes: short jobs are only ever behind short ones, and behind long ones nearly done."""
    outcome = run(two_sizes, "srtf", jobs=5_000)
    took_s, duration_s = jct_s(outcome), np.array(outcome.trace.duration_s)
    short, load = 0.1, LOAD * 0.9 * 0.1
    # Schrage and Miller 1966: W(x) = λ (E[S²; S ≤ x] + x² P(S > x)) / (2 (1 − ρ(<x)) (1 − ρ(≤x))),
    # and nothing is smaller than the short ones.
    wait_s = LOAD * short**2 / (2 * (1 - load))
    agrees(took_s[duration_s == short], wait_s + short, most=0.05)
    assert took_s.mean() < jct_s(run(two_sizes, "las", jobs=1_000, quantum_s=0.1)).mean()


def test_littles_law_holds_exactly() -> None:
    """∫ number of jobs dt = Σ JCT, and the contention that a job met is the others' overlap with its life."""
    outcome = run(exponential, "2das", jobs=500, devices=2)
    events = sorted(
        [(moment, 1) for moment in outcome.trace.submit_s] + [(moment, -1) for moment in outcome.finish_s]
    )
    area, present, before_s = 0.0, 0, 0.0
    for moment_s, change in events:
        area += present * (moment_s - before_s)
        present, before_s = present + change, moment_s
    assert area == pytest.approx(float(jct_s(outcome).sum()))
    first = outcome.trace.submit_s[0], outcome.finish_s[0]
    lives = zip(outcome.trace.submit_s, outcome.finish_s, strict=True)
    met_s = sum(max(0.0, min(first[1], end_s) - max(first[0], start_s)) for start_s, end_s in lives)
    assert outcome.contention[0] * (first[1] - first[0]) == pytest.approx(met_s)
