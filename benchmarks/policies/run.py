"""The papers' headlines, measured anew on real traces (README.md).

    python benchmarks/policies/run.py TRACES [EXPERIMENT ...] [--out DIR] [--jobs J]

``TRACES`` is the folder with the trace files that README.md lists. Every experiment writes the summaries of
its policies to ``DIR/policies_EXPERIMENT.json``, which is what ``gpuslice sim ... --compare ... --json``
writes, without the single jobs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpuslice.sched_core.sim.metrics import summary
from gpuslice.sched_core.sim.run import Request, run_all
from gpuslice.sched_core.traces.formats import read_trace

RESULTS = Path(__file__).resolve().parents[1] / "results"
#: Of a distribution, what no table shows.
_LEFT_OUT = ("min", "p95")
#: Of a preemption in Tiresias' testbed: 13,724 s for 221 of them.
MEASURED = "fixed:62s"


@dataclass(frozen=True)
class Experiment:
    """One table of the results.

    Attributes
    ----------
    unit_s
        Seconds that one unit of time of the trace stands for.
    options
        ``--set`` by policy.
    """

    trace: str
    cluster: str
    policies: str
    costs: tuple[str, ...] = ("none", MEASURED)
    unit_s: float = 1.0
    options: dict[str, dict[str, str]] = field(default_factory=dict)

    def requests(self, traces: Path, cost: str) -> list[Request]:
        """What to simulate."""
        trace = read_trace(traces / self.trace).in_units_of(self.unit_s)
        return [
            Request(trace, self.cluster, policy, self.options.get(policy, {}), cost=cost)
            for policy in self.policies.split(",")
        ]

    def commands(self) -> list[str]:
        """The same on the command line."""
        settings = "".join(
            f" --set {policy}.{key}={value}"
            for policy, options in self.options.items()
            for key, value in options.items()
        )
        words = f"gpuslice sim {self.trace} --cluster {self.cluster} --compare {self.policies}{settings}"
        return [f"{words} --cost {cost}" for cost in self.costs]


ALL = "fifo,yarn-cs,srtf,las,2das,gittins,gandiva,themis,chronus"
MINUTES = {"unit_s": 60.0, "policies": "fifo,yarn-cs,srtf,las,2das,gandiva,themis,chronus"}
EXPERIMENTS = {
    "philly480": Experiment("philly_ee9e8c_480.csv", "16x4", ALL),
    "philly480_roomy": Experiment("philly_ee9e8c_480.csv", "32x4", ALL),
    "philly480_published": Experiment(
        "philly_ee9e8c_480.csv",
        "16x4",
        "2das,gittins",
        options={policy: {"thresholds": "3250,7200"} for policy in ("2das", "gittins")},
    ),
    "philly480_days": Experiment(
        "philly_ee9e8c_480.csv",
        "16x4",
        "2das,gittins",
        options={policy: {"thresholds": "36000,360000,1800000"} for policy in ("2das", "gittins")},
    ),
    "philly480_long_slices": Experiment(
        "philly_ee9e8c_480.csv",
        "16x4",
        "las,gandiva",
        options={
            "las": {"quantum_s": "1800"},
            "gandiva": {"quantum_s": "1800", "look_s": "9000", "overload": "100"},
        },
    ),
    "philly20000": Experiment("philly_all_20000.csv", "64x8", "fifo,yarn-cs,fjf,srtf,srsf,2das,gittins"),
    # SwitchCosts is free here: with a cost these take minutes each.
    "philly20000_more": Experiment(
        "philly_all_20000.csv",
        "64x8",
        "sjf,smallest,las,drf,tetris,themis,chronus,optimus,slaq",
        costs=("none",),
    ),
    # Under 62 s a switch, slices of a minute make no progress at all.
    "philly20000_turns": Experiment("philly_all_20000.csv", "64x8", "rr,gandiva", costs=("none",)),
    "chronus_mix1": Experiment(
        "chronus/philly_MIX1_s1000.csv", "5x8", costs=("none", "fixed:30s"), **MINUTES
    ),
    "chronus_slo": Experiment("chronus/philly_SLO_s1000.csv", "5x8", costs=("none", "fixed:30s"), **MINUTES),
    "chronus_mix2": Experiment("chronus/philly_MIX2_s120.csv", "2x8", costs=("none", "fixed:30s"), **MINUTES),
}
for _trace, _variant, _option in (
    ("mix1", "short_leases", {"lease_s": "600"}),
    ("slo", "short_leases", {"lease_s": "600"}),
    ("slo", "greedy", {"solver": "greedy"}),
    ("slo", "horizon", {"horizon": "500"}),
):
    EXPERIMENTS[f"chronus_{_trace}_{_variant}"] = replace(
        EXPERIMENTS[f"chronus_{_trace}"], policies="chronus", options={"chronus": _option}
    )


def measure(experiment: Experiment, traces: Path, workers: int) -> dict[str, Any]:
    """Run one experiment under each of its costs."""
    found: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commands": experiment.commands(),
        "costs": {},
    }
    for cost in experiment.costs:
        outcomes = run_all(experiment.requests(traces, cost), workers)
        found["costs"][cost] = [brief(summary(outcome)) for outcome in outcomes]
    return found


def brief(value: Any) -> Any:
    """What a file keeps of a summary: seven digits; mean, median, p90, p99 and max; no nulls."""
    if isinstance(value, dict):
        kept = {key: brief(item) for key, item in value.items() if item is not None}
        return {key: item for key, item in kept.items() if key not in _LEFT_OUT}
    return float(f"{value:.7g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=", ".join(EXPERIMENTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    for name in asked.experiments or EXPERIMENTS:
        found = measure(EXPERIMENTS[name], asked.traces, asked.jobs)
        path = asked.out / f"policies_{name}.json"
        path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        print(path, flush=True)


if __name__ == "__main__":
    main()
