"""Fixtures of the tests of a scheduler with real processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from .bench import Bench, children


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def ramdisks() -> Iterator[Path]:
    """Where each node has a RAM disk of its own."""
    with tempfile.TemporaryDirectory(prefix="gpuslice-test-", dir="/dev/shm") as made:
        yield Path(made)


@pytest.fixture
def former() -> list[psutil.Process]:
    """What other tests let Python start in this process, such as the resource tracker of multiprocessing."""
    return psutil.Process().children(recursive=True)


@pytest.fixture
def open_bench(directory: Path, former: list[psutil.Process]) -> Iterator[Callable[[int], Bench]]:
    opened: list[Bench] = []

    def open_one(device_count: int = 1) -> Bench:
        opened.append(Bench(directory, device_count))
        return opened[-1]

    yield open_one
    for bench in opened:
        bench.scheduler.close()
    assert children(former) == []


@pytest.fixture
def enough(tmp_path: Path) -> Path:
    """A job that trains until there is such a file is suspended in between, however slow the machine is."""
    return tmp_path / "enough"
