"""Jobs in turns on two nodes, and the same jobs on one node with as many slots: how much longer that takes.

    python -m benchmarks.relocation.turns FILE [--jobs 5] [--steps 1100]

Two nodes of two slots, the second by a command in the place of ssh, then one node of four slots. Each job has
as many steps of 20 ms, and a quantum is 2 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import msgspec

from tests.cli.conftest import Shell

from .run import TRAIN, own_machines

_DEADLINE_S = 900.0
_KINDS = ("relocated", "suspended", "arrived")


def _makespan(shell: Shell, jobs: int, steps: int, *up: str) -> dict[str, float | int]:
    """Run the jobs. Return the seconds from the first submission to the last end, and what happened."""
    shell("up", "--quantum", "2s", *up, deadline_s=_DEADLINE_S)
    client = shell.client()
    names = [shell("submit", str(TRAIN), "1", str(steps)).strip() for _ in range(jobs)]
    ends = [client.wait(name, _DEADLINE_S) for name in names]
    if any(end is None or end.state != "succeeded" for end in ends):
        raise RuntimeError(f"a job has not ended well: {ends}")
    events = [msgspec.json.decode(line) for line in shell("events", "--json").splitlines()]
    shell("down")
    at_s = {
        what: [event["at_s"] for event in events if event["what"] == what] for what in ("submitted", "exited")
    }
    counts = Counter(event["what"] for event in events)
    return {
        "makespan_s": round(max(at_s["exited"]) - min(at_s["submitted"]), 1),
        **{kind: counts[kind] for kind in _KINDS},
    }


def _measure(jobs: int, steps: int, *up: str) -> dict[str, float | int]:
    """Run the jobs with machines of their own."""
    with own_machines() as shell:
        return _makespan(shell, jobs, steps, *up)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1100)
    options = parser.parse_args(words)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    one = _measure(options.jobs, options.steps, "--devices", "cpu:4")
    two = _measure(options.jobs, options.steps, "--devices", "cpu:2", "--node", "b=one")
    result = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {cores} cores, load {load:.1f} before",
        "one node of four slots": one,
        "two nodes of two slots": two,
        "ratio": round(two["makespan_s"] / one["makespan_s"], 2),
    }
    print(json.dumps(result, indent=1))
    options.file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
