"""Two long trainings and five short ones behind them on one device: how long each takes, by policy.

python -m benchmarks.completion_time.run [--long 12000] [--short 20] [--device cpu:1] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.own_scheduler import scheduler
from gpuslice import config
from gpuslice.demo.training import SCRIPTS, Training, digest, steady

POLICIES = {"fifo": ("--policy", "fifo"), "2das": ("--policy", "2das", "--set", "thresholds=2")}
LONG, SHORT = 2, 5


def alone(words: Sequence[str]) -> tuple[str, float]:
    """Without gpuslice: the digest, and how many seconds that took from the start of its process."""
    begin_s = time.monotonic()
    with tempfile.NamedTemporaryFile() as output:
        command = [sys.executable, *words]
        subprocess.run(command, env=steady(os.environ), cwd=SCRIPTS, stdout=output, check=True)
        return digest(Path(output.name)), time.monotonic() - begin_s


def shared(commands: Sequence[list[str]], device: str, policy: Sequence[str]) -> list[dict[str, Any]]:
    """Let all in, one right after the other, once each has imported torch; how each fared."""
    options = ("--devices", device, "--prestart", str(LONG + SHORT), *policy)
    with scheduler(*options) as (client, _), tempfile.TemporaryDirectory(dir="/dev/shm") as ramdisk:
        environ = {**steady(os.environ), config.variable("ramdisk_dir"): ramdisk}
        jobs: list[str] = []
        for words in commands:
            jobs.append(client.submit(words, environ=environ, directory=str(SCRIPTS)))
            client.suspend(jobs[-1])
        while sum(event.what == "hello" for event in client.events()) < len(jobs):
            assert client.wait(jobs[0], 0.5) is None
        for job in jobs:
            client.resume(job)
        ended = [client.wait(job) for job in jobs]
        at_s = {(event.job, event.what): event.at_s for event in client.events()}
        digests = [digest(Path(client.logs(job).out)) for job in jobs]
    return [
        {
            "steps": info.steps,
            "completion_s": at_s[info.id, "exited"] - at_s[info.id, "released"],
            "executed_s": info.executed_s,
            "setup_s": info.setup_s,
            "slices": info.slices,
            "blackout_s": info.blackout_s,
            "digest": model,
        }
        for info, model in zip(filter(None, ended), digests, strict=True)
    ]


def show(runs: dict[str, list[dict[str, Any]]]) -> None:
    """The table of both runs, in seconds."""
    print(f"{'steps':>8}" + "".join(f"{name:>10}" for name in runs))
    for rows in zip(*runs.values(), strict=True):
        print(f"{rows[0]['steps']:8}" + "".join(f"{row['completion_s']:10.1f}" for row in rows))
    print(f"{'average':>8}" + "".join(f"{average_s(rows):10.1f}" for rows in runs.values()))


def average_s(rows: Sequence[dict[str, Any]]) -> float:
    """Mean completion time."""
    return mean(row["completion_s"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", type=int, default=12_000, help="steps of the two long trainings")
    parser.add_argument("--short", type=int, default=20, help="steps of the five short ones")
    parser.add_argument("--device", default="cpu:1", help="as `gpuslice up --devices` has it")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    steps = [options.long] * LONG + [options.short] * SHORT
    torch_device = "cpu" if options.device.startswith("cpu") else options.device
    commands = {count: Training("wine", "", count).words(torch_device) for count in steps}
    undisturbed = {count: alone(words) for count, words in commands.items()}
    queue = [commands[count] for count in steps]
    runs = {name: shared(queue, options.device, policy) for name, policy in POLICIES.items()}
    for rows in runs.values():
        digests = [row["digest"] for row in rows]
        assert digests == [undisturbed[count][0] for count in steps], "the models differ"
    show(runs)
    times_better = average_s(runs["fifo"]) / average_s(runs["2das"])
    print(f"2das is {times_better:.2f} times better; every digest is that of an undisturbed run")
    if options.out is not None:
        about = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "load": os.getloadavg()[0],
            "policies": {name: " ".join(words) for name, words in POLICIES.items()},
            "alone_s": {count: spent_s for count, (_, spent_s) in undisturbed.items()},
            "times_better": times_better,
        }
        options.out.write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
