"""A mixed queue on one slot: makespan with ``--pack`` against plain round robin, in turn.

python benchmarks/packing/run.py [--jobs 12] [--steps 150] [--rounds 1] [--out FILE.json]
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
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpuslice import config
from gpuslice.client.client import Client
from gpuslice.demo.training import steady

SCRIPT = Path(__file__).with_name("train.py")
#: Milliseconds of waiting and of computing in a step.
KINDS = {"waits": (60.0, 2.0), "mixed": (30.0, 30.0), "computes": (0.0, 60.0)}
UP = ("--devices", "cpu:1", "--policy", "rr", "--quantum", "2s")


def makespan(words: list[tuple[str, list[str]]], extra: tuple[str, ...]) -> dict[str, Any]:
    """All jobs submitted at once; seconds until the last has ended, and what was decided of pairs."""
    gpuslice = [sys.executable, "-m", "gpuslice"]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuslice-bench-"))) / "s"
        ramdisk = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuslice-bench-", dir="/dev/shm"))
        place = ["--state-dir", str(directory)]
        subprocess.run([*gpuslice, "up", *UP, *extra, *place], check=True, stdout=subprocess.DEVNULL)
        stack.callback(subprocess.run, [*gpuslice, "down", *place], check=True)
        client = stack.enter_context(Client(directory))
        environ = {**steady(os.environ), config.variable("ramdisk_dir"): ramdisk}
        begin_s = time.monotonic()
        for name, command in words:
            client.submit(command, name=name, environ=environ, device_memory_bytes=512 << 20)
        ended = [client.wait(name) for name, _ in words]
        total_s = time.monotonic() - begin_s
        assert all(job is not None and job.exit_code == 0 for job in ended), ended
        verdicts = [event for event in client.events() if event.what in ("packed", "unpacked")]
        failed = [event.details for event in client.events() if event.what == "policy_failed"]
        assert not failed, failed
        pairs = [
            {
                "what": event.what,
                "jobs": [event.job, event.details["beside"]],
                **{
                    name: round(float(event.details[name] or 0), 3)
                    for name in ("slowdown", "slowdown_low", "slowdown_high", "total")
                },
            }
            for event in verdicts
        ]
    return {"makespan_s": round(total_s, 1), "pairs": pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kinds = [options.only] if options.only else list(KINDS)
    words = []
    for number in range(options.jobs):
        kind = kinds[number % len(kinds)]
        command = [str(SCRIPT), str(options.steps), *map(str, KINDS[kind])]
        words.append((f"{kind}-{number}", command))
    rounds = []
    for _ in range(options.rounds):
        plain, packed = makespan(words, ()), makespan(words, ("--pack",))
        ratio = round(plain["makespan_s"] / packed["makespan_s"], 3)
        load = round(os.getloadavg()[0], 1)
        rounds.append({"ratio": ratio, "load": load, "plain": plain, "packed": packed})
        print(json.dumps(rounds[-1]), flush=True)
    if options.out is not None:
        about = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "jobs": options.jobs,
            "steps": options.steps,
            "kinds": {kind: KINDS[kind] for kind in kinds},
        }
        options.out.write_text(json.dumps({**about, "rounds": rounds}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
