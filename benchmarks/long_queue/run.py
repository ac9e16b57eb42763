"""A long queue of tiny trainings: how long it takes beside running them two by two, and how much memory.

python benchmarks/long_queue/run.py [--jobs 300] [--slots 2] [--prestart N] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from gpuslice import config
from gpuslice.client.client import Client
from gpuslice.demo.training import steady

SCRIPT = Path(__file__).with_name("train.py")
LOOK_AGAIN_S = 0.25


@contextmanager
def scheduler(slots: int, options: Sequence[str]) -> Iterator[Client]:
    """``gpuslice up`` with so many slots of the host, taken down at the end."""
    gpuslice = [sys.executable, "-m", "gpuslice"]
    with tempfile.TemporaryDirectory(prefix="gpuslice-bench-") as name:
        place = ["--state-dir", str(Path(name) / "s")]
        subprocess.run(
            [*gpuslice, "up", "--devices", f"cpu:{slots}", *options, *place],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        try:
            with Client(Path(name) / "s") as client:
                yield client
        finally:
            subprocess.run([*gpuslice, "down", *place], check=True)


def side_by_side(jobs: int, slots: int) -> tuple[float, set[str]]:
    """Without gpuslice, so many at a time as there are slots: how long that took, and what they printed."""

    def train(_: int) -> str:
        words = [sys.executable, str(SCRIPT)]
        return subprocess.run(
            words, env=steady(os.environ), check=True, capture_output=True, text=True
        ).stdout

    begin_s = time.monotonic()
    with ThreadPoolExecutor(slots) as pool:
        printed = set(pool.map(train, range(jobs)))
    return time.monotonic() - begin_s, printed


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


def queued(jobs: int, slots: int, options: Sequence[str]) -> dict[str, Any]:
    """All handed in at once; how long until the last has ended, and what they took meanwhile."""
    with scheduler(slots, options) as client, tempfile.TemporaryDirectory(dir="/dev/shm") as ramdisk:
        environ = {**steady(os.environ), config.variable("ramdisk_dir"): ramdisk}
        with Memory(client.status().pid) as memory:
            begin_s = time.monotonic()
            names = [client.submit([str(SCRIPT)], environ=environ) for _ in range(jobs)]
            submitted_s = time.monotonic() - begin_s
            ended = [client.wait(name) for name in names]
            spent_s = time.monotonic() - begin_s
        assert {job and job.state for job in ended} == {"succeeded"}
        printed = {Path(client.logs(name).out).read_text() for name in names}
    return {
        "spent_s": spent_s,
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
    before_s, printed = side_by_side(wishes.jobs // 2, wishes.slots)
    found = queued(wishes.jobs, wishes.slots, options)
    after_s, _ = side_by_side(wishes.jobs - wishes.jobs // 2, wishes.slots)
    assert found.pop("printed") == printed, "they trained otherwise"
    found |= {"side_by_side_s": before_s + after_s, "times": found["spent_s"] / (before_s + after_s)}
    print(
        f"{wishes.jobs} jobs on cpu:{wishes.slots}: {found['spent_s']:.1f} s, {found['times']:.2f} times the"
    )
    print(
        f"{found['side_by_side_s']:.1f} s of {wishes.slots} at a time; {found['submit_ms']:.1f} ms a submit"
    )
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
