"""Two ranks that suspend and resume at once, beside one after the other; and what memcpy gains by that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.child import Child
from benchmarks.states import median

RANKS = 2


@pytest.fixture
def ranks(tmpfs: Path) -> Iterator[list[Child]]:
    started = [Child("benchmarks.parallel_restore.rank", "adam-800", tmpfs, index) for index in range(RANKS)]
    for rank in started:
        assert rank.listen() == "ready"
    yield started
    for rank in started:
        rank.close()


def one_by_one(ranks: list[Child], word: str) -> float:
    """Seconds."""
    seconds = 0.0
    for rank in ranks:
        seconds += float(rank.ask(word))
    return seconds


def at_once(ranks: list[Child], word: str) -> float:
    """Seconds until the last of them is done."""
    for rank in ranks:
        rank.tell(word)
    return max(float(rank.listen()) for rank in ranks)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < RANKS, reason="a core for every rank is needed")
def test_two_ranks_at_once(benchmark: Any, ranks: list[Child], rounds: int) -> None:
    """Turn and turn about, and begun by either in turn, so that whatever the machine does hits both alike."""
    spent_s: dict[str, list[float]] = {}
    ways = [one_by_one, at_once]

    def round_of_all() -> None:
        ways.reverse()
        for way in ways:
            at_once(ranks, "train")  # all that training changes, before every suspend
            for word in ("copy", "suspend", "resume"):
                spent_s.setdefault(f"{word}_{way.__name__}_s", []).append(way(ranks, word))

    benchmark.pedantic(round_of_all, rounds=rounds, warmup_rounds=1)
    extra = benchmark.extra_info
    extra.update({name: median(seconds[1:]) for name, seconds in spent_s.items()})
    for word in ("copy", "suspend", "resume"):
        extra[f"{word}_speedup"] = extra[f"{word}_one_by_one_s"] / extra[f"{word}_at_once_s"]
