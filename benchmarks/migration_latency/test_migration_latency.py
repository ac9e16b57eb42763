"""How long a job stands still when it goes on in another process, beside suspend and resume in its own."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks.child import Child
from benchmarks.migration_latency.target import digest
from benchmarks.states import STATES, State, median
from gpuslice.checkpoint.discover.heap import hide_imports
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

hide_imports()  # as under `gpuslice run`
TARGET = "benchmarks.migration_latency.target"
COLD_ROUNDS = 3


@pytest.fixture(scope="module", params=sorted(STATES))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


class Source:
    """The job's present process, with the clocks of one migration after the other."""

    def __init__(self, state: State, store: JobStore) -> None:
        self.state = state
        self.directory = store.directory
        self._switch = Switch(open_device(DeviceName("cpu", None)), store)
        self._boundary = 0
        self.suspend_s: list[float] = []
        self.resume_s: list[float] = []

    def come_back(self) -> None:
        """Resume in this process."""
        if self._switch.suspended:
            began_s = time.perf_counter()
            self._switch.resume()
            self.resume_s.append(time.perf_counter() - began_s)

    def train(self) -> None:
        """Back in this process, a step that changes all that training changes."""
        self.come_back()
        self.state.train()

    def suspend(self) -> str:
        """Leave the device; the snapshot's path."""
        self._boundary += 1
        began_s = time.perf_counter()
        self._switch.suspend(boundary=self._boundary, named=self.state.named, restartable=True)
        self.suspend_s.append(time.perf_counter() - began_s)
        assert self._switch.snapshot is not None
        return str(self._switch.snapshot.path)


@pytest.fixture
def source(name: str, store: JobStore) -> Source:
    source = Source(STATES[name](), store)
    for _ in range(2):  # both slots are there
        source.train()
        source.suspend()
    source.train()
    source.suspend_s.clear()
    source.resume_s.clear()
    return source


def note(benchmark: Any, source: Source) -> None:
    """The ratio, of medians of the same run."""
    source.come_back()
    extra = benchmark.extra_info
    extra["suspend_s"], extra["resume_s"] = median(source.suspend_s), median(source.resume_s)
    extra["ratio"] = benchmark.stats.stats.median / (extra["suspend_s"] + extra["resume_s"])


def test_into_a_warm_process(benchmark: Any, name: str, source: Source, rounds: int) -> None:
    """It has imported torch and built the job's objects, and has the arena mapped."""
    target = Child(TARGET, name, source.directory)
    assert target.listen() == "warm"
    restore_s: list[float] = []

    def migrate() -> None:
        path = source.suspend()
        began_s = time.perf_counter()
        assert target.ask(path) == "here"
        restore_s.append(time.perf_counter() - began_s)

    benchmark.pedantic(migrate, setup=source.train, rounds=rounds, warmup_rounds=2)
    arrived = target.ask("check")
    note(benchmark, source)
    assert arrived == digest(source.state)
    benchmark.extra_info["restore_s"] = median(restore_s[2:])
    target.close()


def test_into_a_new_process(benchmark: Any, name: str, source: Source) -> None:
    """It starts when the job has left its device: interpreter, torch, objects, snapshot."""

    def migrate() -> None:
        target = Child(TARGET, name, source.suspend())
        assert target.listen() == "here"
        targets.append(target)

    targets: list[Child] = []
    benchmark.pedantic(migrate, setup=source.train, rounds=COLD_ROUNDS)
    note(benchmark, source)
    for target in targets:
        target.close()
