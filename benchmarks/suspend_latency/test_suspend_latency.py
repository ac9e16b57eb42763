"""How long a suspend takes, beside the best copy of the same bytes and beside the usual ways to save."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from benchmarks.states import STATE_BYTES, STATES, Limit, State, median, page_faults
from gpuslice.checkpoint.heap import hide_imports
from gpuslice.checkpoint.ramdisk import RamDisk
from gpuslice.checkpoint.record import SwitchRecord
from gpuslice.checkpoint.switch import Switch
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

hide_imports()  # as under `gpuslice run`
ROUNDS = int(os.environ.get("GPUSLICE_BENCH_ROUNDS", "7"))
STAGES = ("quiesce_s", "find_s", "admit_s", "copy_out_s", "publish_s", "free_s")


@pytest.fixture(scope="module", params=sorted(STATES))
def state(request: pytest.FixtureRequest) -> State:
    return STATES[request.param]()


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gpuslice-bench-") as directory:
        os.chmod(directory, 0o700)
        yield Path(directory)


@pytest.fixture
def switch(tmpfs: Path) -> Iterator[Switch]:
    with RamDisk(tmpfs / "ramdisk", 3 * STATE_BYTES + 2**28).open_store(None) as store:
        yield Switch(open_device(DeviceName("cpu", None)), store)


def note(benchmark: Any, state: State, **extra: object) -> None:
    benchmark.extra_info.update(extra, bytes=state.nbytes, tensors=len(state.tensors))
    benchmark.extra_info["gb_per_s"] = state.nbytes / benchmark.stats.stats.median / 1e9


def test_limit(benchmark: Any, state: State, tmpfs: Path) -> None:
    limit = Limit(state.tensors, tmpfs, outward=True)
    benchmark.pedantic(limit, rounds=ROUNDS, warmup_rounds=2)
    limit.close()
    note(benchmark, state)


def test_suspend(benchmark: Any, state: State, switch: Switch) -> None:
    """Into a warm arena, after a training step that changed all that training changes."""
    records: list[SwitchRecord] = []
    faults: list[float] = []

    def train() -> None:
        if switch.suspended:
            switch.resume()
        state.train()

    def suspend() -> None:
        before = page_faults()
        records.append(switch.suspend(boundary=len(records) + 1))
        faults.append(page_faults() - before)

    for _ in range(2):
        suspend()
        train()
    del records[:], faults[:]
    benchmark.pedantic(suspend, setup=train, rounds=ROUNDS)
    switch.resume()
    stages = {stage: median([getattr(record, stage) for record in records]) for stage in STAGES}
    note(benchmark, state, **stages, unchanged=records[-1].bytes_unchanged, page_faults=median(faults))


def test_first_suspend(benchmark: Any, state: State, switch: Switch) -> None:
    """The arena is made: its pages are faulted in."""
    benchmark.pedantic(switch.suspend, kwargs={"boundary": 1}, rounds=1)
    record = switch.resume()
    assert record.cold
    note(benchmark, state, admit_s=record.admit_s)


def test_torch_save(benchmark: Any, state: State, tmpfs: Path) -> None:
    benchmark.pedantic(lambda: torch.save(state.state_dict(), tmpfs / "state.pt"), rounds=3)
    note(benchmark, state)


def test_safetensors(benchmark: Any, state: State, tmpfs: Path) -> None:
    tensors = {str(number): tensor.detach() for number, tensor in enumerate(state.tensors)}
    benchmark.pedantic(lambda: save_file(tensors, tmpfs / "state.safetensors"), rounds=3)
    note(benchmark, state)


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoint(benchmark: Any, state: State, tmpfs: Path) -> None:
    def save() -> None:
        shutil.rmtree(tmpfs / "dcp", ignore_errors=True)
        dcp.save(state.state_dict(), checkpoint_id=tmpfs / "dcp", no_dist=True)

    benchmark.pedantic(save, rounds=3)
    note(benchmark, state)
