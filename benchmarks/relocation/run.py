"""How long a job stands still when it goes to another node, by the bytes of its state.

    python -m benchmarks.relocation.run FILE [--mib 1,32,256] [--moves 6]

Three nodes of one machine, two of them by a command in the place of ssh. Snapshots go over the agents'
sockets. The goal is 2 s and what the bytes take over one encrypted connection, which is measured after each
size.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import msgspec

from gpuslice.client.client import Client
from gpuslice.config import LOCK_DIR
from tests.cli.conftest import Shell
from tests.gpuslice.nodes.machines import machines_in, shell_of

from .link import link_bytes_per_s

TRAIN = Path(__file__).with_name("train.py")
_DEADLINE_S = 600.0
_LOOK_AGAIN_S = 0.2
#: What a move may take besides its bytes.
_FIXED_S = 2.0


@contextmanager
def own_machines() -> Iterator[Shell]:
    """A shell with machines, a RAM disk and device locks of its own."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
        machines_in(Path(shm)) as machines,
        shell_of(machines) as shell,
    ):
        shell.variables["GPUSLICE_RAMDISK_DIR"] = str(machines.ramdisks / "own")
        shell.variables[LOCK_DIR] = str(machines.root)
        yield shell


def _trains_on(client: Client, job: str, steps: int) -> int:
    """Wait until ``job`` has made more than ``steps`` steps. Return its steps."""
    while True:
        ended = client.wait(job, _LOOK_AGAIN_S)
        (found,) = [one for one in client.jobs() if one.id == job]
        if ended is not None:
            raise RuntimeError(f"the job has ended: {ended}")
        if found.steps > steps:
            return found.steps


def _moves(shell: Shell, client: Client, mib: int, moves: int) -> dict[str, object]:
    """Move a job with a state of ``mib`` MiB so often from node to node. Return medians."""
    job = shell("submit", str(TRAIN), str(mib)).strip()
    steps = _trains_on(client, job, 0)
    for number in range(moves):
        to = ("b/cpu:0", "c/cpu:0", "cpu:0")[number % 3]
        shell("migrate", job, "--to", to, "--wait", deadline_s=_DEADLINE_S)
        steps = _trains_on(client, job, steps + 5)
    events = [msgspec.json.decode(line) for line in shell("events", "--json").splitlines()]
    client.cancel(job)
    client.wait(job, _DEADLINE_S)
    return _medians([event for event in events if event["job"] == job], mib)


def _medians(events: Sequence[dict[str, object]], mib: int) -> dict[str, object]:
    """Return where the time of the moves went, from the events of one job."""
    spent: dict[str, list[float]] = {name: [] for name in ("blackout_s", "transfer_s", "start_s", "setup_s")}
    began_s = relocated_s = brought_s = 0.0
    for event in events:
        at_s, details = float(str(event["at_s"])), event["details"]
        assert isinstance(details, dict)
        match event["what"]:
            case "submitted":
                began_s = at_s
            case "began" if began_s:
                first_s, began_s = at_s - began_s, 0.0
            case "relocated":
                relocated_s, nbytes = at_s, details["bytes"]
            case "brought":
                brought_s = at_s
                spent["transfer_s"].append(at_s - relocated_s)
            case "arrived":
                spent["blackout_s"].append(details["blackout_s"])
                spent["setup_s"].append(details["setup_s"])
                spent["start_s"].append(at_s - details["setup_s"] - brought_s)
            case _:
                pass
    found = {name: round(statistics.median(times_s), 2) for name, times_s in spent.items()}
    link = link_bytes_per_s()
    goal_s = _FIXED_S + int(str(nbytes)) / link
    return {
        "mib": mib,
        "bytes": nbytes,
        "moves": len(spent["blackout_s"]),
        "first_start_s": round(first_s, 2),
        **found,
        "link_mb_per_s": round(link / 1e6),
        "goal_s": round(goal_s, 2),
        "ratio": round(found["blackout_s"] / goal_s, 2),
    }


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--mib", default="1,32,256")
    parser.add_argument("--moves", type=int, default=6)
    options = parser.parse_args()
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    with own_machines() as shell:
        nodes = ("--node", "b=one", "--node", "c=two")
        shell("up", "--devices", "cpu:1", "--quantum", "60s", *nodes, deadline_s=_DEADLINE_S)
        client = shell.client()
        rows = []
        for mib in map(int, options.mib.split(",")):
            rows.append(_moves(shell, client, mib, options.moves))
            print(rows[-1], flush=True)
            result = {
                "date": date.today().isoformat(),
                "machine": f"{platform.machine()}, {cores} cores, load {load:.1f} before",
                "python": platform.python_version(),
                "moves": rows,
            }
            options.file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        shell("down")


if __name__ == "__main__":
    main()
