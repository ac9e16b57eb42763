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
from gpuslice.client.client import Client
from gpuslice.demo.training import steady
from gpuslice.sched_core.nodes import exit_record

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
        Resident, together; a page that several share counts once for each.
    most_pss_bytes
        The same where such a page counts once.
    most_waiting_bytes, most_waiting_pss_bytes
        Of that what the scheduler itself holds and the jobs that wait for their first device.
    most_processes, most_waiting
        Jobs with a process at one time, and those of them that wait.
    """

    def __init__(self, pid: int, directory: Path) -> None:
        self.most_bytes = self.most_pss_bytes = 0
        self.most_waiting_bytes = self.most_waiting_pss_bytes = 0
        self.most_processes = self.most_waiting = 0
        self._scheduler = psutil.Process(pid)
        self._directory = directory
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        with Client(self._directory) as client:
            while not self._over.wait(LOOK_AGAIN_S):
                self._look({job.id for job in client.jobs() if job.state == "queued" and job.started})

    def _look(self, waiting: set[str]) -> None:
        """Look once; ``waiting`` is who waited just before."""
        own, processes = _held([self._scheduler]), at_one_time(self._scheduler.children())
        names = {_number(path): path.stem for path in (self._directory / "logs").glob("*.exit")}
        rss, pss = waiting_rss, waiting_pss = own
        held = 0
        for supervisor in processes:
            one_rss, one_pss = _held(_family(supervisor))
            rss, pss = rss + one_rss, pss + one_pss
            if names.get(supervisor.pid) in waiting:
                held += 1
                waiting_rss, waiting_pss = waiting_rss + one_rss, waiting_pss + one_pss
        self.most_bytes = max(self.most_bytes, rss)
        self.most_pss_bytes = max(self.most_pss_bytes, pss)
        self.most_waiting_bytes = max(self.most_waiting_bytes, waiting_rss)
        self.most_waiting_pss_bytes = max(self.most_waiting_pss_bytes, waiting_pss)
        self.most_processes = max(self.most_processes, len(processes))
        self.most_waiting = max(self.most_waiting, held)


def at_one_time(found: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those of ``found`` that were there together.

    They were found one after the other, and meanwhile one may have ended and the next been started.
    """
    return [process for process in found if process.is_running()]


def _number(record: Path) -> int | None:
    found = exit_record.read(record)
    return None if found is None else found.pid


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _held(processes: Sequence[psutil.Process]) -> tuple[int, int]:
    """RSS and PSS of ``processes``, added up."""
    rss = pss = 0
    for process in processes:
        try:
            found = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        # "Pss:      1234 kB"; one that is ending has no such lines
        held = {line.split(":")[0]: line.split()[1] for line in found.splitlines()[1:]}
        rss, pss = rss + int(held["Rss"]) * 1024, pss + int(held["Pss"]) * 1024
    return rss, pss


def _family_cpu_s(pid: int) -> float:
    """Processor time of the scheduler and of every process below it that has ended."""
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system + used.children_user + used.children_system)


def queued(jobs: int, slots: int, options: Sequence[str]) -> dict[str, Any]:
    """All handed in at once; how long until the last has ended, and what they took meanwhile."""
    options = ("--devices", f"cpu:{slots}", *options)
    with scheduler(*options) as (client, directory), tempfile.TemporaryDirectory(dir="/dev/shm") as ramdisk:
        environ = {**steady(os.environ), config.variable("ramdisk_dir"): ramdisk}
        pid = client.status().pid
        with Memory(pid, directory) as memory:
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
        "most_pss_bytes": memory.most_pss_bytes,
        "most_waiting_bytes": memory.most_waiting_bytes,
        "most_waiting_pss_bytes": memory.most_waiting_pss_bytes,
        "most_processes": memory.most_processes,
        "most_waiting": memory.most_waiting,
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
    gb = {key: value / 1e9 for key, value in found.items() if key.endswith("_bytes")}
    print(f"at most {found['most_processes']} jobs have a process, {found['most_waiting']} of them wait")
    print(f"all: {gb['most_bytes']:.2f} GB resident, {gb['most_pss_bytes']:.2f} GB of PSS; the scheduler and")
    print(f"jobs that wait: {gb['most_waiting_bytes']:.2f} GB, {gb['most_waiting_pss_bytes']:.2f} GB of PSS")
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
