"""What every policy takes on 10,000 devices, and how that grows with the number of jobs.

    python benchmarks/scale/policies.py OUT.json [--policies A,B] [--budget 30]
    python benchmarks/scale/policies.py OUT.json --commands fifo,2das

Every run is a process of its own, so that its peak memory is its own. A policy gets larger and larger traces
until one takes more than the budget of processor time. What OUT.json says of other policies stays there, so
that they can be measured one by one. With ``--commands`` whole commands are measured instead: a million
jobs, ``gpuslice sim`` with ``--json``, from its start to its end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

from gpuslice.sched_core.policies.registry import policy_names

CLUSTER, DEVICES, LOAD = "25x50x8", 10_000, 1.1
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
MILLION = 1_000_000


def one(policy: str, jobs: int) -> dict[str, Any]:
    """Simulate in this process; neither loading compiled code nor making the trace counts."""
    from gpuslice.sched_core.sim.run import Request, run_one
    from gpuslice.sched_core.traces.synth import SynthSpec, synthesize

    run_one(Request(synthesize(SynthSpec(2)), "4x8", "2das", engine="compiled"))
    request = Request(synthesize(SynthSpec(jobs, LOAD, DEVICES, seed=1)), CLUSTER, policy)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    outcome = run_one(request)
    return {
        "jobs": jobs,
        "cpu_s": round(time.process_time() - cpu_s, 3),
        "wall_s": round(time.perf_counter() - wall_s, 3),
        "events": outcome.events,
        "preemptions": int(outcome.preemptions.sum()),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
    }


def measured(policy: str, budget_s: int, most: int) -> dict[str, Any]:
    """All sizes up to ``most`` until one takes too long; the exponent is that of the last step."""
    runs: list[dict[str, Any]] = []
    stopped = None
    for jobs in SIZES:
        if jobs > most:
            stopped = f"{jobs:,}: not tried"
            break
        child = subprocess.run(
            [sys.executable, __file__, "--one", policy, str(jobs)],
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (budget_s, budget_s + 1)),
        )
        if child.returncode:
            over = child.returncode < 0
            stopped = f"{jobs:,}: " + (f"over {budget_s} s" if over else child.stderr.strip()[-200:])
            break
        runs.append(json.loads(child.stdout))
        print(policy, runs[-1], flush=True)
    print(policy, "stopped at", stopped, flush=True)
    steps = [log(b["cpu_s"] / a["cpu_s"]) / log(b["jobs"] / a["jobs"]) for a, b in pairwise(runs)]
    return {
        "policy": policy,
        "budget_s": budget_s,
        "load_average": os.getloadavg()[0],
        "exponent": round(steps[-1], 2) if steps else None,
        "stopped_at": stopped,
        "runs": runs,
    }


def command(policy: str) -> dict[str, Any]:
    """A million jobs by the command line, with a report of all of them."""
    with tempfile.TemporaryDirectory() as folder:
        trace, report = Path(folder, "trace.csv"), Path(folder, "report.json")
        words = ["--jobs", str(MILLION), "--load", str(LOAD), "--cluster", CLUSTER, "--seed", "1"]
        subprocess.run([sys.executable, "-m", "gpuslice", "trace", "synth", str(trace), *words], check=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began_s = time.perf_counter()
        words = ["--cluster", CLUSTER, "--policy", policy, "--json", str(report)]
        subprocess.run([sys.executable, "-m", "gpuslice", "sim", str(trace), *words], check=True)
        wall_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "policy": policy,
            "jobs": MILLION,
            "wall_s": round(wall_s, 1),
            "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
            "peak_mb": after.ru_maxrss // 1000,  # making the trace takes less
            "report_mb": report.stat().st_size // 1_000_000,
            "load_average": os.getloadavg()[0],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--policies", default=",".join(policy_names()))
    parser.add_argument("--budget", type=int, default=30, help="seconds of processor time for one run")
    parser.add_argument("--most", type=int, default=MILLION, help="the largest number of jobs")
    parser.add_argument("--commands", help="policies whose whole command is measured, and nothing else")
    asked = parser.parse_args()
    result: dict[str, Any] = {"policies": [], "commands": []}
    if asked.out.exists():
        result = json.loads(asked.out.read_text(encoding="utf-8"))
    result |= {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "cluster": CLUSTER,
        "load": LOAD,
    }
    kind, names, measure = "policies", asked.policies, lambda name: measured(name, asked.budget, asked.most)
    if asked.commands:
        kind, names, measure = "commands", asked.commands, command
    for name in names.split(","):
        found = measure(name)
        result[kind] = [*(other for other in result[kind] if other["policy"] != name), found]
        asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(found, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        print(json.dumps(one(sys.argv[2], int(sys.argv[3]))))
    else:
        main()
