"""Made-up traces: Poisson arrivals, log-normal durations, power-of-two demands."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import log

from gpuslice.errors import UsageError

from .trace import Trace

#: Demands and how often they occur, near Philly's.
_DEMANDS = (1, 2, 4, 8, 16)
_WEIGHTS = (0.75, 0.09, 0.07, 0.07, 0.02)


@dataclass(frozen=True, slots=True)
class SynthSpec:
    """The parameters of a made-up trace.

    Attributes
    ----------
    jobs
        How many.
    load
        Device-seconds that arrive per device-second of the cluster; above 1 the queue grows without end.
    devices
        Size of the cluster that ``load`` is about.
    median_s, sigma
        Median duration and the standard deviation of its logarithm.
    seed
        Same seed, same trace, on any machine.
    """

    jobs: int
    load: float = 0.9
    devices: int = 32
    median_s: float = 1800.0
    sigma: float = 1.5
    seed: int = 0


def synthesize(spec: SynthSpec) -> Trace:
    """Return a made-up trace, in whole seconds.

    Raises
    ------
    UsageError
        If a number is impossible.
    """
    for what, number, most in (
        ("jobs", spec.jobs, 10**8),
        ("load", spec.load, 1e6),
        ("devices", spec.devices, 10**8),
        ("median", spec.median_s, 1e9),
        ("sigma", spec.sigma, 10.0),
    ):
        if not (0 < number <= most or (what == "sigma" and number == 0)):
            raise UsageError(
                f"a trace cannot have a {what} of {number}", f"give a number above 0, up to {most:g}"
            )
    draw = random.Random(spec.seed)
    demands = [demand for demand in _DEMANDS if demand <= spec.devices]
    weights = _WEIGHTS[: len(demands)]
    demand = draw.choices(demands, weights, k=spec.jobs)
    duration_s = [
        float(max(1, round(draw.lognormvariate(log(spec.median_s), spec.sigma)))) for _ in range(spec.jobs)
    ]
    service = sum(d * s for d, s in zip(demand, duration_s, strict=True))
    gap_s = service / spec.jobs / (spec.load * spec.devices)
    submit_s, now_s = [], 0.0
    for _ in range(spec.jobs):
        submit_s.append(float(int(now_s)))
        now_s += draw.expovariate(1.0) * gap_s
    return Trace([str(i) for i in range(spec.jobs)], submit_s, demand, duration_s, name=f"synth-{spec.seed}")
