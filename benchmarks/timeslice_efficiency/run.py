"""Real trainings that share one device against the same ones, one after the other; where the difference went.

python -m benchmarks.timeslice_efficiency.run [--factor 3] [--rounds 3] [--device cpu] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.own_scheduler import scheduler
from gpuslice import config
from gpuslice.daemon.replay import JournalReplay
from gpuslice.demo.recorder import Recorder
from gpuslice.demo.training import SCRIPTS, TRAININGS, Training, steady
from gpuslice.sched_core.journal.journal import FILE

DIGEST = re.compile(r"^digest (\w+)$", re.MULTILINE)
ONE_AFTER_THE_OTHER = ("--policy", "fifo")
TIME_SLICED = ("--policy", "rr")  # with its default quantum


def plain(trainings: Sequence[Training], device: str) -> dict[str, Any]:
    """One after the other, without gpuslice."""
    begin_s, digests = time.monotonic(), {}
    for training in trainings:
        words = [sys.executable, *training.words(device)]
        done = subprocess.run(
            words, cwd=SCRIPTS, env=steady(os.environ), capture_output=True, text=True, check=True
        )
        digests[training.name] = DIGEST.findall(done.stdout)
    return {"total_s": time.monotonic() - begin_s, "digests": digests}


def scheduled(trainings: Sequence[Training], device: str, policy: Sequence[str]) -> dict[str, Any]:
    """All submitted at once to a scheduler with ``policy``."""
    devices = device if ":" in device else f"{device}:1"
    with (
        tempfile.TemporaryDirectory(prefix="gpuslice-bench-", dir="/dev/shm") as ramdisk,
        scheduler("--devices", devices, *policy) as (client, directory),
    ):
        begin_s = time.monotonic()
        environ = {**steady(os.environ), config.variable("ramdisk_dir"): ramdisk}
        for one in trainings:
            client.submit(one.words(device), name=one.name, environ=environ, directory=str(SCRIPTS))
        ended = [client.wait(one.name) for one in trainings]
        total_s = time.monotonic() - begin_s
        assert all(job is not None and job.exit_code == 0 for job in ended), ended
        digests = {one.name: DIGEST.findall(Path(client.logs(one.name).out).read_text()) for one in trainings}
        recorder = Recorder(begin_s)
        with JournalReplay(directory / FILE) as replay:
            for event, at_s, commands in replay.advance():
                recorder.observe(event, at_s, commands)
    return {"total_s": total_s, "digests": digests, "busy_s": recorder.busy_s, **account(recorder)}


def account(recorder: Recorder) -> dict[str, Any]:
    """Where the device's time went that was not training, in seconds over all switches."""
    stages_s: dict[str, float] = {}
    for one in recorder.slices:
        for stage, spent_s in one.stages_s.items():
            stages_s[stage] = stages_s.get(stage, 0.0) + spent_s
    switches = recorder.switches
    return {
        "switches": len(switches),
        "suspend_s": sum(one.suspend_s for one in switches),
        "handoff_s": sum(one.handoff_s for one in switches),
        "resume_s": sum(one.resume_s for one in switches),
        "stages_s": stages_s,
    }


def compare(one_round: dict[str, Any]) -> dict[str, float]:
    """Ratios of one round, and what the time-sliced run lost to what, as shares of the other's busy time."""
    sliced, fifo = one_round["time_sliced"], one_round["one_after_the_other"]
    base_s = fifo["busy_s"]
    lost = {name: (sliced[name] - fifo[name]) / base_s for name in ("suspend_s", "handoff_s", "resume_s")}
    ratio = sliced["busy_s"] / base_s
    return {
        "busy_ratio": ratio,
        "total_ratio_to_plain": sliced["total_s"] / one_round["plain"]["total_s"],
        "suspends": lost["suspend_s"],
        "handoffs": lost["handoff_s"],
        "resumes": lost["resume_s"],
        "slower_training": ratio - 1.0 - sum(lost.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--factor", type=float, default=3.0, help="steps, as a multiple of the demonstration's"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    trainings = [Training(one.name, one.about, round(one.steps * options.factor)) for one in TRAININGS]
    rounds = []
    for _ in range(options.rounds):
        one_round = {
            "plain": plain(trainings, options.device),
            "one_after_the_other": scheduled(trainings, options.device, ONE_AFTER_THE_OTHER),
            "time_sliced": scheduled(trainings, options.device, TIME_SLICED),
        }
        assert len({json.dumps(run.pop("digests")) for run in one_round.values()}) == 1, "the models differ"
        one_round["load"] = os.getloadavg()[0]
        one_round["compared"] = compare(one_round)
        print(
            {name: round(value, 3) for name, value in one_round["compared"].items()},
            "load",
            one_round["load"],
            flush=True,
        )
        rounds.append(one_round)
    medians = {
        name: statistics.median(one["compared"][name] for one in rounds) for name in rounds[0]["compared"]
    }
    print("medians", {name: round(value, 3) for name, value in medians.items()})
    if options.out is not None:
        about = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "steps": {one.name: one.steps for one in trainings},
        }
        options.out.write_text(json.dumps({**about, "medians": medians, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
