"""How long gangs of 1 to 4 ranks stand still: back in their own processes, or on in other, warm ones.

    python -m benchmarks.migration_latency.gangs OUT.json [--mib 100,1000] [--ranks 1,2,4] [--rounds 5] ...

The other processes are on the same node, or on another one with a RAM disk of its own (``other_node.py``).
``--mib`` is the state of the whole gang, divided among its ranks. All ranks begin at once; none comes back
before all have left, as the scheduler has it.

Memory: three times the state, and what the processes take. The state is in the source's slot, in the target
process, and in the source process or, while that is parked, in the other node's RAM disk.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median_high
from typing import Any

from benchmarks.child import Child
from gpuslice.memory import available_bytes

SHM = Path("/dev/shm")
#: What the processes take beside the state, by rank (measured: 630 with one rank, 570 with four).
PROCESSES_MIB = 650
SOURCE, TARGET = "benchmarks.migration_latency.source", "benchmarks.migration_latency.target"
NODE = "benchmarks.migration_latency.other_node"
PATIENCE_S = 300.0
#: Makes the slot of a rank, and maps it in the other process.
WARM_UP = 2


class Gang:
    """The ranks' processes, those they migrate to, and the clocks of their switches.

    Parameters
    ----------
    mib
        Of the state, if there is another node; else 0.
    """

    def __init__(self, state: str, ranks: int, directory: Path, mib: int) -> None:
        self.sources = [Child(SOURCE, state, directory, rank) for rank in range(ranks)]
        stores = [source.listen() for source in self.sources]
        self.targets = [Child(TARGET, state, store) for store in stores]
        for target in self.targets:
            assert target.listen() == "warm"
        self._pool = ThreadPoolExecutor(ranks)
        self.node: list[Child] = []
        if mib:
            sender = Child(NODE, "send", directory / "ramdisk")
            limit = f"{mib + 256}MiB"
            port = sender.listen()
            self.node = [Child(NODE, "receive", directory / "elsewhere", limit, port), sender]
            assert self.node[0].listen() == "ready"

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """``work`` for every rank, at the same time."""
        return list(self._pool.map(work, range(len(self.sources))))

    def ask(self, word: str) -> list[dict[str, Any]]:
        """Every source's answer."""
        return self.each(lambda rank: json.loads(self.sources[rank].ask(word)))

    def switch(self, come_back: Callable[[int, str], dict[str, float]]) -> dict[str, float]:
        """All leave, then all come back; seconds in all, and those of the slowest rank by stage."""
        parked = threading.Barrier(len(self.sources))

        def one(rank: int) -> dict[str, float]:
            left = json.loads(self.sources[rank].ask("suspend"))
            left_s = time.perf_counter()
            parked.wait(PATIENCE_S)
            stages = {"suspend_s": left_s - began_s, **left["stages"]}
            before_s = time.perf_counter()
            stages |= come_back(rank, left["path"])
            return {**stages, "resume_s": time.perf_counter() - before_s}

        began_s = time.perf_counter()
        found = self.each(one)
        blackout_s = time.perf_counter() - began_s
        slowest = {name: max(stages[name] for stages in found) for name in found[0]}
        return {"blackout_s": blackout_s, **slowest}

    def here(self, rank: int, path: str) -> dict[str, float]:
        """Back in the same process."""
        stages: dict[str, float] = json.loads(self.sources[rank].ask("resume"))["stages"]
        return stages

    def there(self, rank: int, path: str) -> dict[str, float]:
        """On in the other process."""
        assert self.targets[rank].ask(path) == "here"
        return {}

    def elsewhere(self) -> dict[str, float]:
        """All leave, and go on in the other processes from what was shipped; seconds in all, and by stage."""
        began_s = time.perf_counter()
        self.ask("suspend")
        left_s = time.perf_counter()
        paths = json.loads(self.node[0].ask("fetch"))
        shipped_s = time.perf_counter()
        self.each(lambda rank: self.there(rank, paths[rank]))
        here_s = time.perf_counter()
        self.node[0].ask("forget")
        stages = {"suspend_s": left_s - began_s, "ship_s": shipped_s - left_s, "resume_s": here_s - shipped_s}
        return {"blackout_s": here_s - began_s, **stages}

    def check(self) -> None:
        """Both processes have the same bytes."""
        for answer, target in zip(self.ask("check"), self.targets, strict=True):
            assert answer["digest"] == target.ask("check")

    def close(self) -> None:
        """End all processes."""
        self._pool.shutdown()
        for child in (*self.sources, *self.targets, *self.node):
            child.close()


def measure(gang: Gang, rounds: int) -> dict[str, Any]:
    """Turn and turn about, so that whatever the machine does hits both alike."""
    same: list[dict[str, float]] = []
    other: list[dict[str, float]] = []
    elsewhere: list[dict[str, float]] = []
    for _ in range(WARM_UP + rounds):
        gang.ask("train")
        same.append(gang.switch(gang.here))
        gang.ask("train")
        other.append(gang.switch(gang.there))
        gang.ask("resume")
        if gang.node:
            gang.check()
            gang.ask("train")
            elsewhere.append(gang.elsewhere())
            gang.ask("resume")
    gang.check()
    found = {"same_process": _medians(same[WARM_UP:]), "other_process": _medians(other[WARM_UP:])}
    ratio = found["other_process"]["blackout_s"] / found["same_process"]["blackout_s"]
    more = {"other_node": _medians(elsewhere[WARM_UP:])} if elsewhere else {}
    return {**found, "ratio": round(ratio, 3), **more}


def _medians(switches: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(median_high(switch[name] for switch in switches), 5) for name in switches[0]}


def check_memory(mib: int, ranks: int) -> None:
    """End with a message if the memory is not there: later the kernel would kill some process."""
    status = os.statvfs(SHM)
    for what, needed_mib, free_bytes in (
        ("memory", 3 * mib + PROCESSES_MIB * ranks, available_bytes()),
        (str(SHM), 2 * mib + 256, status.f_bavail * status.f_frsize),
    ):
        free_mib = free_bytes >> 20
        if needed_mib > free_mib:
            sys.exit(f"{mib} MiB on {ranks} ranks take {needed_mib} MiB of {what}; {free_mib} MiB are free")


def case(state: str, mib: int, ranks: int, rounds: int, *, node: bool) -> dict[str, Any]:
    """One line of the table."""
    check_memory(mib, ranks)
    os.environ["GPUSLICE_BENCH_MIB"] = str(max(1, mib // ranks))
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun has it
    with tempfile.TemporaryDirectory(dir=SHM) as directory:
        gang = Gang(state, ranks, Path(directory), mib if node else 0)
        try:
            found = measure(gang, rounds)
        finally:
            gang.close()
    return {"state": state, "mib": mib, "ranks": ranks, "rounds": rounds, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mib", default="100,1000")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--state", default="adam-800")
    parser.add_argument("--no-node", action="store_true", help="leave the other node out")
    asked = parser.parse_args()
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load_average_before": os.getloadavg()[0],
        "cases": [],
    }
    for mib in map(int, asked.mib.split(",")):
        for ranks in map(int, asked.ranks.split(",")):
            result["cases"].append(case(asked.state, mib, ranks, asked.rounds, node=not asked.no_node))
            print(result["cases"][-1], flush=True)
            asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
