"""What all benchmarks share: results name the machine by what it is, not by its host name.

Nothing here imports torch before a fixture is asked for: some benchmarks have no use for it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.summary import summarize

if TYPE_CHECKING:
    from benchmarks.states import State
    from gpuslice.checkpoint.ramdisk.store import JobStore


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    machine_info.pop("node", None)
    machine_info["cores"] = len(os.sched_getaffinity(0))
    machine_info["load"] = os.getloadavg()[0]
    try:
        import torch
    except ImportError:
        return
    machine_info["torch"] = torch.__version__
    machine_info["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def pytest_benchmark_update_commit_info(config: Any, commit_info: dict[str, Any]) -> None:
    for name in ("project", "branch"):
        commit_info.pop(name, None)


def pytest_benchmark_update_json(config: Any, benchmarks: Any, output_json: dict[str, Any]) -> None:
    summarize(output_json)


@pytest.fixture(scope="session")
def rounds() -> int:
    """How often whatever is ours, and the limit, is measured: ``GPUSLICE_BENCH_ROUNDS``, or 7."""
    return int(os.environ.get("GPUSLICE_BENCH_ROUNDS", "7"))


@pytest.fixture(scope="module", params=["adam-800", "frozen-base", "small-4000"])
def state(request: pytest.FixtureRequest) -> State:
    """One of the states of ``benchmarks/states.py``, trained a step."""
    from benchmarks.states import STATES

    return STATES[request.param]()


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A private directory on tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gpuslice-bench-") as directory:
        os.chmod(directory, 0o700)
        yield Path(directory)


@pytest.fixture
def store(tmpfs: Path) -> Iterator[JobStore]:
    """A store of a job with a name, with room for two snapshots of the state."""
    from benchmarks.states import STATE_BYTES
    from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk

    with RamDisk(tmpfs / "ramdisk", 5 * STATE_BYTES + 2**28).open_store("bench") as opened:
        yield opened


@pytest.fixture
def note(benchmark: Any, state: State) -> Iterator[Callable[..., None]]:
    """``note(name=value)``: into the result, beside the state's size and the rate."""
    yield lambda **extra: benchmark.extra_info.update(extra)
    benchmark.extra_info.update(bytes=state.nbytes, tensors=len(state.tensors))
    if benchmark.stats is not None:
        benchmark.extra_info["gb_per_s"] = state.nbytes / benchmark.stats.stats.median / 1e9
