"""How long a device is nobody's when two jobs swap: one after the other, and both at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.duplex_swap.pair import Job, a_pair, at_once, one_after_the_other
from benchmarks.states import median

#: How often the memory of both is looked at.
_LOOK_S = 0.002

Jobs = tuple[Job, Job]


@pytest.fixture(params=[32 << 20, 128 << 20], ids=["32MiB", "128MiB"])
def jobs(request: pytest.FixtureRequest, tmpfs: Path) -> Iterator[Jobs]:
    pair = a_pair(tmpfs, request.param, "adam-800")
    yield pair
    for job in pair:
        job.close()


def memory_bytes(job: Job) -> int:
    """RssAnon: what the RAM disk holds is not part of it."""
    status = Path(f"/proc/{job.pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Watch:
    """The most memory that two jobs have together while it is on."""

    def __init__(self, jobs: Jobs) -> None:
        self.most_bytes = 0
        self._over = threading.Event()

        def look() -> None:
            while not self._over.wait(_LOOK_S):
                self.most_bytes = max(self.most_bytes, sum(memory_bytes(job) for job in jobs))

        self._thread = threading.Thread(target=look)
        self._thread.start()

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self.most_bytes


def test_two_jobs_swap(benchmark: Any, jobs: Jobs, rounds: int) -> None:
    """Turn and turn about, so that whatever else the machine does hits both ways alike."""
    spent_s: dict[str, list[float]] = {}
    share: dict[str, list[float]] = {}

    def swap(way: Callable[[Job, Job], None], leaving: Job, coming: Job) -> None:
        leaving.do("train")
        before_bytes = sum(memory_bytes(job) for job in jobs)
        watch = Watch(jobs)
        began_s = time.perf_counter()
        way(leaving, coming)
        spent_s.setdefault(way.__name__, []).append(time.perf_counter() - began_s)
        share.setdefault(way.__name__, []).append((watch.stop() - before_bytes) / coming.nbytes)

    def round_of_both() -> None:
        first, second = jobs
        for way in (one_after_the_other, at_once):
            swap(way, first, second)
            swap(way, second, first)

    benchmark.pedantic(round_of_both, rounds=rounds, warmup_rounds=1)
    extra = benchmark.extra_info
    extra["bytes"] = jobs[0].nbytes
    for name, seconds in spent_s.items():
        extra[f"{name}_s"] = median(seconds[2:])
        extra[f"{name}_most_above"] = max(share[name][2:])
    extra["ratio"] = extra["at_once_s"] / extra["one_after_the_other_s"]
