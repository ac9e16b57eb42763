"""Two ranks that suspend and resume at once, beside one after the other; and what memcpy gains by that."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.states import median

ROUNDS = int(os.environ.get("GPUSLICE_BENCH_ROUNDS", "7"))
RANKS = 2


class Rank:
    """A process with one rank in it."""

    def __init__(self, state: str, directory: Path, index: int) -> None:
        module = "benchmarks.parallel_restore.rank"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, state, str(directory), str(index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, word: str) -> None:
        """Have it do something."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def listen(self) -> str:
        """Wait until that is done; its answer."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        assert answer, "a rank has died"
        return answer

    def close(self) -> None:
        """End it."""
        self._process.communicate()


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gpuslice-bench-") as directory:
        os.chmod(directory, 0o700)
        started = [Rank("adam-800", Path(directory), index) for index in range(RANKS)]
        for rank in started:
            assert rank.listen() == "ready"
        yield started
        for rank in started:
            rank.close()


def one_by_one(ranks: list[Rank], word: str) -> float:
    """Seconds."""
    seconds = 0.0
    for rank in ranks:
        rank.tell(word)
        seconds += float(rank.listen())
    return seconds


def at_once(ranks: list[Rank], word: str) -> float:
    """Seconds until the last of them is done."""
    for rank in ranks:
        rank.tell(word)
    return max(float(rank.listen()) for rank in ranks)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < RANKS, reason="a core for every rank is needed")
def test_two_ranks_at_once(benchmark: Any, ranks: list[Rank]) -> None:
    """Turn and turn about, so that whatever else the machine does hits both alike."""
    spent_s: dict[str, list[float]] = {}

    def round_of_all() -> None:
        for way in (one_by_one, at_once):
            for word in ("copy", "suspend", "resume"):
                spent_s.setdefault(f"{word}_{way.__name__}_s", []).append(way(ranks, word))

    benchmark.pedantic(round_of_all, rounds=ROUNDS, warmup_rounds=1)
    extra = benchmark.extra_info
    extra.update({name: median(seconds[1:]) for name, seconds in spent_s.items()})
    for word in ("copy", "suspend", "resume"):
        extra[f"{word}_speedup"] = extra[f"{word}_one_by_one_s"] / extra[f"{word}_at_once_s"]
