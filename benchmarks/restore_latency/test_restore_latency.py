"""How long a resume takes, here and from a new mapping, beside the best copy and the usual ways to load."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from benchmarks.states import STATE_BYTES, STATES, Limit, State, median, page_faults
from gpuslice.checkpoint.heap import hide_imports
from gpuslice.checkpoint.lazy import LazyResume
from gpuslice.checkpoint.ramdisk import RamDisk
from gpuslice.checkpoint.record import SwitchRecord
from gpuslice.checkpoint.snapshot import open_snapshot
from gpuslice.checkpoint.state import check
from gpuslice.checkpoint.switch import Switch
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

hide_imports()  # as under `gpuslice run`
ROUNDS = int(os.environ.get("GPUSLICE_BENCH_ROUNDS", "7"))
STAGES = ("reserve_s", "verify_s", "copy_in_s")


@pytest.fixture(scope="module", params=sorted(STATES))
def state(request: pytest.FixtureRequest) -> State:
    return STATES[request.param]()


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gpuslice-bench-") as directory:
        os.chmod(directory, 0o700)
        yield Path(directory)


def note(benchmark: Any, state: State, **extra: object) -> None:
    benchmark.extra_info.update(extra, bytes=state.nbytes, tensors=len(state.tensors))
    benchmark.extra_info["gb_per_s"] = state.nbytes / benchmark.stats.stats.median / 1e9


def test_limit(benchmark: Any, state: State, tmpfs: Path) -> None:
    limit = Limit(state.tensors, tmpfs, outward=False)
    benchmark.pedantic(limit, rounds=ROUNDS, warmup_rounds=2)
    limit.close()
    note(benchmark, state)


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "trusting"])
def test_resume(benchmark: Any, state: State, tmpfs: Path, verify: bool) -> None:
    """In the same process; memory is taken back, faulted in and filled."""
    records: list[SwitchRecord] = []
    faults: list[float] = []
    with RamDisk(tmpfs / "ramdisk", 3 * STATE_BYTES + 2**28).open_store(None) as store:
        switch = Switch(open_device(DeviceName("cpu", None)), store, verify=verify)

        def suspend() -> None:
            switch.suspend(boundary=len(records) + 1)

        def resume() -> None:
            before = page_faults()
            records.append(switch.resume())
            faults.append(page_faults() - before)

        for _ in range(2):
            suspend()
            resume()
        del records[:], faults[:]
        benchmark.pedantic(resume, setup=suspend, rounds=ROUNDS)
    stages = {stage: median([getattr(record, stage) for record in records]) for stage in STAGES}
    parked = max(record.rss_parked_bytes - record.rss_before_bytes + state.nbytes for record in records)
    note(benchmark, state, **stages, page_faults=median(faults), left_share=parked / state.nbytes)


def test_lazy_resume(benchmark: Any, state: State, tmpfs: Path) -> None:
    """In the same process, up to where the training goes on: every weight is back, moments come later."""
    records: list[SwitchRecord] = []
    lazy = LazyResume()
    with RamDisk(tmpfs / "ramdisk", 3 * STATE_BYTES + 2**28).open_store(None) as store:
        switch = Switch(open_device(DeviceName("cpu", None)), store, lazy=lazy)
        state.train()  # the optimizer must have been seen stepping

        def suspend() -> None:
            switch.suspend(boundary=len(records) + 1)

        def resume() -> None:
            records.append(switch.resume())

        for _ in range(2):
            suspend()
            resume()
        del records[:]
        benchmark.pedantic(resume, setup=suspend, rounds=ROUNDS)
        switch.settle()
        lazy.close()
    names = (*STAGES, "stream_s")
    stages = {stage: median([getattr(record, stage) for record in records]) for stage in names}
    later = median([record.bytes_later / record.bytes_freed for record in records])
    note(benchmark, state, **stages, later_share=later)


def test_restore_from_a_new_mapping(benchmark: Any, state: State, tmpfs: Path) -> None:
    """What another process does: open the file, check every byte, load into live objects."""
    with RamDisk(tmpfs / "ramdisk", 3 * STATE_BYTES + 2**28).open_store("bench") as store:
        switch = Switch(open_device(DeviceName("cpu", None)), store)
        switch.suspend(boundary=1, named=state.named, restartable=True)
        switch.resume()
        assert switch.snapshot is not None
        path = switch.snapshot.path

        def restore() -> None:
            with open_snapshot(path) as snapshot:
                check(snapshot, state.named).apply()

        benchmark.pedantic(restore, rounds=ROUNDS, warmup_rounds=1)
    note(benchmark, state)


@pytest.mark.parametrize("mmap", [False, True], ids=["plain", "mmap"])
def test_torch_load(benchmark: Any, state: State, tmpfs: Path, mmap: bool) -> None:
    torch.save(state.state_dict(), tmpfs / "state.pt")

    def load() -> None:
        loaded = torch.load(tmpfs / "state.pt", weights_only=True, mmap=mmap)
        state.module.load_state_dict(loaded["model"])
        state.base.load_state_dict(loaded["base"])
        state.optimizer.load_state_dict(loaded["optimizer"])

    benchmark.pedantic(load, rounds=3)
    note(benchmark, state)


def test_safetensors(benchmark: Any, state: State, tmpfs: Path) -> None:
    live = {str(number): tensor.detach() for number, tensor in enumerate(state.tensors)}
    save_file(live, tmpfs / "state.safetensors")

    def load() -> None:
        for name, loaded in load_file(tmpfs / "state.safetensors").items():
            live[name].copy_(loaded)

    benchmark.pedantic(load, rounds=3)
    note(benchmark, state)


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoint(benchmark: Any, state: State, tmpfs: Path) -> None:
    dcp.save(state.state_dict(), checkpoint_id=tmpfs / "dcp", no_dist=True)
    benchmark.pedantic(
        lambda: dcp.load(state.state_dict(), checkpoint_id=tmpfs / "dcp", no_dist=True), rounds=3
    )
    note(benchmark, state)
