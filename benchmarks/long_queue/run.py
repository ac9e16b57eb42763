"""A long queue of tiny trainings: how long it takes beside running them two by two, and how much memory.

python -m benchmarks.long_queue.run [--jobs 300] [--slots 2] [--prestart N] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.own_scheduler import scheduler
from gpuslice import config
from gpuslice.demo.training import steady

SCRIPT = Path(__file__).with_name("train.py")
LOOK_AGAIN_S = 0.25


def side_by_side(jobs: int, slots: int) -> tuple[float, float, set[str]]:
    """Without gpuslice, so many at a time as there are slots: how long, processor time, what they printed."""

    def train(_: int) -> str:
        words = [sys.executable, str(SCRIPT)]
        return subprocess.run(
            words,
            env=steady(os.environ),
            check=True,
            capture_output=True,
            text=True,
            start_new_session=True,  # as a scheduler's jobs: the kernel may divide the cores among sessions
        ).stdout

    begin_s, begin_cpu_s = time.monotonic(), _children_cpu_s()
    with ThreadPoolExecutor(slots) as pool:
        printed = set(pool.map(train, range(jobs)))
    return time.monotonic() - begin_s, _children_cpu_s() - begin_cpu_s, printed


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Memory:
    """What a scheduler and all below it hold, looked at now and then.

    Attributes
    ----------
    most_bytes
        Resident, together, and of that what a page that several share counts once for each.
    most_processes
        Jobs with a process at one time.
    """

    def __init__(self, pid: int) -> None:
        self.most_bytes = 0
        self.most_processes = 0
        self._scheduler = psutil.Process(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_AGAIN_S):
            family = [self._scheduler, *self._scheduler.children(recursive=True)]
            held = [one for one in map(_resident_bytes, family) if one]
            self.most_bytes = max(self.most_bytes, sum(held))
            self.most_processes = max(self.most_processes, len(self._scheduler.children()))


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _family_cpu_s(pid: int) -> float:
    """Processor time of the scheduler and of every process below it that has ended."""
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system + used.children_user + used.children_system)


def queued(jobs: int, slots: int, options: Sequence[str]) -> dict[str, Any]:
    """All handed in at once; how long until the last has ended, and what they took meanwhile."""
    options = ("--devices", f"cpu:{slots}", *options)
    with scheduler(*options) as (client, _), tempfile.TemporaryDirectory(dir="/dev/shm") as ramdisk:
        environ = {**steady(os.environ), config.variable("ramdisk_dir"): ramdisk}
        pid = client.status().pid
        with Memory(pid) as memory:
            begin_s, begin_cpu_s = time.monotonic(), _family_cpu_s(pid)
            names = [client.submit([str(SCRIPT)], environ=environ) for _ in range(jobs)]
            submitted_s = time.monotonic() - begin_s
            ended = [client.wait(name) for name in names]
            spent_s, cpu_s = time.monotonic() - begin_s, _family_cpu_s(pid) - begin_cpu_s
        assert {job and job.state for job in ended} == {"succeeded"}
        printed = {Path(client.logs(name).out).read_text() for name in names}
    return {
        "spent_s": spent_s,
        "cpu_s": cpu_s,
        "submit_ms": submitted_s / jobs * 1e3,
        "most_bytes": memory.most_bytes,
        "most_processes": memory.most_processes,
        "printed": printed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--prestart", help="as of `gpuslice up`")
    parser.add_argument("--out", type=Path)
    wishes = parser.parse_args()
    options = [] if wishes.prestart is None else ["--prestart", wishes.prestart]
    # One half before and one after, because a machine that others use is not the same all the time.
    before_s, before_cpu_s, printed = side_by_side(wishes.jobs // 2, wishes.slots)
    found = queued(wishes.jobs, wishes.slots, options)
    after_s, after_cpu_s, _ = side_by_side(wishes.jobs - wishes.jobs // 2, wishes.slots)
    assert found.pop("printed") == printed, "they trained otherwise"
    alone_s, alone_cpu_s = before_s + after_s, before_cpu_s + after_cpu_s
    found |= {"side_by_side_s": alone_s, "times": found["spent_s"] / alone_s}
    found |= {"side_by_side_cpu_s": alone_cpu_s, "cpu_times": found["cpu_s"] / alone_cpu_s}
    print(
        f"{wishes.jobs} jobs on cpu:{wishes.slots}: {found['spent_s']:.1f} s, {found['times']:.2f} times the"
    )
    print(f"{alone_s:.1f} s of {wishes.slots} at a time; {found['submit_ms']:.1f} ms a submit")
    print(f"processor time {found['cpu_s']:.1f} s, {found['cpu_times']:.2f} times {alone_cpu_s:.1f} s")
    print(f"at most {found['most_processes']} started, {found['most_bytes'] / 1e9:.2f} GB with the scheduler")
    if wishes.out is not None:
        about = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "load": os.getloadavg()[0],
            "jobs": wishes.jobs,
            "slots": wishes.slots,
        }
        wishes.out.write_text(json.dumps({**about, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
