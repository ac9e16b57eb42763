"""What an event costs with more and more jobs in line, policy by policy.

    python benchmarks/sim_throughput/growth.py OUT.json OUT.svg [--policies A,B]

64 devices are full, N jobs wait, 200 short jobs come one by one, and one by one the first 64 end. Measured is
the time from one plan to the next, which is one event of engine and policy together, on the process's own
clock; the mean counts, without the longest hundredth.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
import warnings
from itertools import pairwise
from math import log10
from pathlib import Path
from typing import Any

import numpy as np

from gpuslice.profiler.axes import Axis, log_axis
from gpuslice.profiler.charts import BOTTOM, TOP, Line, plot
from gpuslice.profiler.html import COLOURS, STYLE
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Plan, Policy, View
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.traces.trace import Trace

SHORT = 200
#: Policies whose rule makes them look at every job that waits are measured with fewer of them.
LONG_LINES, SHORT_LINES = (100, 1_000, 10_000, 100_000), (100, 300, 1_000, 3_000)
POLICIES = {
    **dict.fromkeys(
        ("fifo", "sjf", "srtf", "las", "2das", "gittins", "yarn-cs", "drf", "gandiva", "optimus", "slaq"),
        LONG_LINES,
    ),
    **dict.fromkeys(("tetris", "themis", "chronus"), SHORT_LINES),
}
_HIGHEST_US, _LOWEST_US = 1e5, 10.0
_KEYS = ("waiting", "us_per_event")


class Timed:
    """A policy that notes when it was asked, and ends the run after ``until_s`` of the trace."""

    def __init__(self, policy: Policy, until_s: float) -> None:
        self.name, self.needs_durations = policy.name, policy.needs_durations
        self.asked_s: list[float] = []
        self._policy = policy
        self._until_s = until_s

    def plan(self, view: View) -> Plan:
        if view.now_s > self._until_s:
            raise KeyboardInterrupt
        self.asked_s.append(time.process_time())
        return self._policy.plan(view)


def line_up(waiting: int) -> Trace:
    """64 jobs that end one after the other, ``waiting`` long ones behind them, and short ones later on."""
    long = 64 + waiting
    ids = [str(i) for i in range(long + SHORT)]
    submit_s = [0.0] * long + [10.0 + 10.0 * i for i in range(SHORT)]
    duration_s = [5.0 + 30.0 * i for i in range(64)] + [1e7 + i for i in range(waiting)] + [30.0] * SHORT
    return Trace(ids, submit_s, [1] * len(ids), duration_s)


def growth(name: str, waiting: int) -> dict[str, Any]:
    """The mean time per event while short jobs come and others end."""
    policy = Timed(make_policy(name), until_s=10.0 * SHORT)
    Simulation(line_up(waiting), Cluster.parse("8x8"), policy).run()
    gaps = sorted(after - before for before, after in pairwise(policy.asked_s[2:]))
    kept = gaps[: len(gaps) - len(gaps) // 100 - 1]
    us = round(sum(kept) / len(kept) * 1e6, 1)
    print(f"{name}, {waiting} waiting: {us} us", flush=True)
    return {"policy": name, "waiting": waiting, "events": len(gaps), "us_per_event": us}


def picture(found: list[dict[str, Any]]) -> str:
    """Both axes logarithmic: a straight line upwards is growth in proportion."""
    names = list(dict.fromkeys(item["policy"] for item in found))
    lines = [
        Line(
            name, *(np.array([float(item[key]) for item in found if item["policy"] == name]) for key in _KEYS)
        )
        for name in names
    ]
    across = log_axis("jobs waiting", np.array([float(item["waiting"]) for item in found]), times=False)
    marks_us = [10.0**power for power in range(round(log10(_LOWEST_US)), round(log10(_HIGHEST_US)) + 1)]
    up = Axis("", _LOWEST_US, _HIGHEST_US, {us: f"{us / 1e3:g} ms" for us in marks_us}, logarithmic=True)
    drawn = plot(across, lines, up=up, tall=420 - TOP - BOTTOM)
    # Room for the longest label on the left, and for the names beside the lines.
    keys = "".join(
        f'<text x="700" y="{24 + 15 * row}" style="fill: {COLOURS[row % len(COLOURS)]}">{name}'
        f"{'' if row < len(COLOURS) else ' (dashed)'}</text>"
        for row, name in enumerate(names)
    )
    head = 'xmlns="http://www.w3.org/2000/svg" viewBox="-60 0 850 420"'
    body = f'<svg width="680" height="420" overflow="visible">{drawn}</svg>{keys}'
    return f"<svg {head}>{body}<style>{STYLE}</style></svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--policies", default=",".join(POLICIES))
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    found = [growth(name, waiting) for name in asked.policies.split(",") for waiting in POLICIES[name]]
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
        "growth": found,
    }
    asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    asked.svg.write_text(picture(found), encoding="utf-8")


if __name__ == "__main__":
    main()
