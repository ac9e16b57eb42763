"""Submits an array of a thousand jobs and asks for the jobs: the times of whole commands."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.own_scheduler import scheduler
from gpuslice.version import __version__

_GPUSLICE = [sys.executable, "-m", "gpuslice"]


def once(*words: str) -> dict[str, float]:
    """Run a command and return its wall time and its processor time, in seconds."""
    before, begin_s = os.times(), time.perf_counter()
    subprocess.run([*_GPUSLICE, *words], check=True, stdout=subprocess.DEVNULL)
    wall_s, after = time.perf_counter() - begin_s, os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall_s": round(wall_s, 3), "cpu_s": round(cpu_s, 3)}


def spread(found: list[float]) -> dict[str, float]:
    """Return the least, the median and the most of ``found``."""
    found = sorted(found)
    return {"least": found[0], "median": median(found), "most": found[-1]}


def measure(jobs: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return the times of each command, by what it does. Each round has a scheduler of its own."""
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        with scheduler("--devices", "null:8", "--policy", "rr") as (_, directory):
            place = ("--state-dir", str(directory))
            array = ("--array", f"0-{jobs - 1}%8", "--", "sleep", "1000")
            for name, words in (
                ("ps, no jobs", ("ps", *place)),
                ("submit --array", ("submit", *place, "--name", "sweep", *array)),
                ("ps", ("ps", *place)),
                ("ps --expand", ("ps", "--expand", *place)),
                ("ps --json", ("ps", "--json", *place)),
                ("cancel glob", ("cancel", "sweep-*", *place)),
            ):
                found.setdefault(name, []).append(once(*words))
    return found


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} virtual cores ({platform.machine()})",
        "python": platform.python_version(),
        "gpuslice": __version__,
        "jobs": options.jobs,
        "rounds": options.rounds,
        "load_before": [round(one, 1) for one in os.getloadavg()],
    }
    result["seconds"] = {
        name: {what: spread([one[what] for one in times]) for what in ("wall_s", "cpu_s")}
        for name, times in measure(options.jobs, options.rounds).items()
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["seconds"], indent=1))


if __name__ == "__main__":
    main()
