"""How scattered gangs lie, and how long jobs wait for places, with and without ``--defragment``.

    python benchmarks/fragmentation/run.py TRACE CLUSTER OUT.json [--policies A,B] [--placements A,B]

Jobs are slower where they lie apart, as ``--speed`` says, and switches cost ``--cost``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.sim.metrics import summary
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.sim.run import Request, run_all
from gpuslice.sched_core.traces.formats import read_trace
from gpuslice.sched_core.traces.trace import Trace

COST = "fixed:62s"
#: On more nodes than needed, and what the moves take that to cost.
APART = 1.2


def denser(trace: Trace, factor: float) -> Trace:
    """The same jobs, arriving ``factor`` times as fast."""
    first_s = trace.submit_s[0]
    submit_s = [float(round(first_s + (at_s - first_s) / factor)) for at_s in trace.submit_s]
    return Trace(trace.ids, submit_s, trace.demand, trace.duration_s, trace.extras, name=trace.name)


def fragmentation(outcome: Outcome, cluster: Cluster) -> dict[str, float]:
    """What Philly's and Gandiva's authors looked at.

    ``scattered`` is the part of the device-seconds of gangs that was spent on more nodes than needed, and
    ``nodes_too_many`` how many more these had on average over those device-seconds. ``idle_in_idle_nodes`` is
    the part of idle device-seconds that lay on nodes of which no device was used.
    Of the waiting of gangs, ``gangs_fragmentation_s`` is the mean time in which enough devices were free.
    """
    gangs = scattered = too_many = 0.0
    changes: list[tuple[float, int, int]] = []
    for span in outcome.spans:
        held_s = (span.end_s - span.start_s) * len(span.devices)
        counts: dict[int, int] = {}
        for device in span.devices:
            counts[cluster.node_of[device]] = counts.get(cluster.node_of[device], 0) + 1
        changes += [(span.start_s, node, count) for node, count in counts.items()]
        changes += [(span.end_s, node, -count) for node, count in counts.items()]
        if len(span.devices) > 1:
            more = len(counts) - cluster.closest(len(span.devices)).nodes
            gangs, scattered, too_many = (
                gangs + held_s,
                scattered + held_s * (more > 0),
                too_many + held_s * more,
            )
    fragmented_s = outcome.fragmented_s[np.array(outcome.trace.demand) > 1]
    return {
        "scattered": scattered / gangs,
        "nodes_too_many": too_many / gangs,
        "idle_in_idle_nodes": _idle(changes, cluster),
        "gangs_fragmentation_s": float(fragmented_s.mean()),
    }


def _idle(changes: list[tuple[float, int, int]], cluster: Cluster) -> float:
    """The part of idle device-seconds on wholly idle nodes, from the first change to the last."""
    used, sizes = [0] * len(cluster.node_sizes), cluster.node_sizes
    idle, whole = cluster.size, cluster.size
    idle_s = whole_s = 0.0
    changes.sort()
    before_s = changes[0][0]
    for at_s, node, count in changes:
        idle_s += (at_s - before_s) * idle
        whole_s += (at_s - before_s) * whole
        before_s = at_s
        whole -= 0 if used[node] else sizes[node]
        used[node] += count
        idle -= count
        whole += 0 if used[node] else sizes[node]
    return whole_s / idle_s


def row(outcome: Outcome, request: Request, cluster: Cluster) -> dict[str, Any]:
    """One line of the table."""
    numbers = summary(outcome)
    return {
        "policy": request.policy,
        "placement": request.placement,
        "defragment": "defragment" in request.options,
        "jct_mean_s": numbers["jct_s"]["mean"],
        "jct_p99_s": numbers["jct_s"]["p99"],
        "makespan_s": numbers["makespan_s"],
        "migrations": numbers["migrations"],
        "lost_device_s": numbers["lost_device_s"],
        "counters": numbers["policy_counters"],
        **fragmentation(outcome, cluster),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("cluster")
    parser.add_argument("out", type=Path)
    parser.add_argument("--policies", default="fifo,2das,srtf")
    parser.add_argument("--placements", default="count,consolidated")
    parser.add_argument("--faster", type=float, default=1.0, help="how many times as fast the jobs arrive")
    parser.add_argument("--apart", type=float, default=APART, help="slowdown on more nodes than needed")
    parser.add_argument("--cost", default=COST, help="of a switch")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    asked = parser.parse_args()
    trace, cluster = denser(read_trace(asked.trace), asked.faster), Cluster.parse(asked.cluster)
    with tempfile.TemporaryDirectory() as folder:
        speed = Path(folder, "speed.json")
        speed.write_text(json.dumps({"spread": asked.apart}), encoding="utf-8")
        requests = [
            Request(
                trace,
                asked.cluster,
                policy,
                {"defragment": "true", "apart_nodes": str(asked.apart)} if moves else {},
                placement=placement,
                cost=asked.cost,
                speed=str(speed),
                keep_spans=True,
            )
            for policy in asked.policies.split(",")
            for placement in asked.placements.split(",")
            for moves in (False, True)
        ]
        outcomes = run_all(requests, asked.jobs)
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "trace": asked.trace.name,
        **{name: getattr(asked, name) for name in ("cluster", "faster", "apart", "cost")},
        "runs": [row(*pair, cluster) for pair in zip(outcomes, requests, strict=True)],
    }
    asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for found in result["runs"]:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()})


if __name__ == "__main__":
    main()
