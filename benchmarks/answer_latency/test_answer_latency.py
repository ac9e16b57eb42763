"""How long a user waits for an answer: processor time and wall time of whole commands, beside a bare Python.

All of it in one run, round after round, so that what else the machine does hits every side alike.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

JOBS = 100
ROUNDS = 15
COMMANDS = {
    "python -c pass": ("-c", "pass"),
    "ps": ("-m", "gpuslice", "ps"),
    "ps --json": ("-m", "gpuslice", "ps", "--json"),
    "wait, of a job that has ended": ("-m", "gpuslice", "wait", "job-1"),
    "ps --help": ("-m", "gpuslice", "ps", "--help"),
    "submit": ("-m", "gpuslice", "submit", "--", "true"),
}


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a scheduler with many jobs that have ended."""
    found = {**os.environ, "GPUSLICE_STATE_DIR": str(tmp_path / "s")}

    def gpuslice(*words: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "gpuslice", *words], env=found, check=True, stdout=subprocess.DEVNULL
        )

    gpuslice("up", "--devices", "null:1")
    from gpuslice.client.client import Client

    with Client(tmp_path / "s") as client:
        for number in range(JOBS):
            client.submit(["--", "true"], name=f"job-{number}")
        client.wait(f"job-{JOBS - 1}")
    yield found
    gpuslice("down")


def once(words: tuple[str, ...], environ: dict[str, str]) -> tuple[float, float]:
    """Processor seconds and wall seconds of one command."""
    before, begin_s = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *words], env=environ, check=True, stdout=subprocess.DEVNULL)
    wall_s, after = time.perf_counter() - begin_s, os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return cpu_s, wall_s


def test_answers(benchmark: Any, environ: dict[str, str]) -> None:
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}

    def one_of_each() -> None:
        for name, words in COMMANDS.items():
            taken[name].append(once(words, environ))

    benchmark.pedantic(one_of_each, rounds=ROUNDS, warmup_rounds=1)
    for name, times in taken.items():
        cpu_s, wall_s = ([one[which] for one in times] for which in (0, 1))
        benchmark.extra_info[name] = {
            "cpu_median_s": median(cpu_s),
            "cpu_least_s": min(cpu_s),
            "wall_median_s": median(wall_s),
            "wall_least_s": min(wall_s),
        }
