"""How long a suspend takes, beside the best copy of the same bytes and beside the usual ways to save."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from benchmarks.states import Limit, State, median, page_faults, timed
from gpuslice.checkpoint.discover.heap import hide_imports
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.record import SUSPEND_STAGES, SwitchRecord
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

hide_imports()  # as under `gpuslice run`

Note = Callable[..., None]


@pytest.fixture
def switch(store: JobStore) -> Switch:
    return Switch(open_device(DeviceName("cpu", None)), store)


def test_limit(benchmark: Any, state: State, tmpfs: Path, note: Note, rounds: int) -> None:
    benchmark.pedantic(Limit(state.sizes, tmpfs, outward=True), rounds=rounds, warmup_rounds=2)


def test_suspend(benchmark: Any, state: State, switch: Switch, tmpfs: Path, note: Note, rounds: int) -> None:
    """Into a warm arena, after a training step that changed all that training changes.

    Before each, the limit's copy: ``limit_s`` is its median, ``share_of_limit`` the median of the quotients.
    """
    limit = Limit(state.sizes, tmpfs, outward=True)
    records: list[SwitchRecord] = []
    faults: list[float] = []
    limits_s: list[float] = []
    shares: list[float] = []

    def train() -> None:
        if switch.suspended:
            switch.resume()
        state.train()
        limits_s.append(timed(limit))

    def suspend() -> None:
        before = page_faults()
        took_s = timed(lambda: records.append(switch.suspend(boundary=len(records) + 1)))
        faults.append(page_faults() - before)
        shares.append(limits_s[-1] / took_s)

    for _ in range(3):
        train()
        suspend()
    del records[:], faults[:], limits_s[:], shares[:]
    benchmark.pedantic(suspend, setup=train, rounds=rounds)
    switch.resume()
    stages = {stage: median([getattr(record, stage) for record in records]) for stage in SUSPEND_STAGES}
    note(**stages, unchanged=records[-1].bytes_unchanged, page_faults=median(faults))
    note(limit_s=median(limits_s), share_of_limit=median(shares))


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warmed-up"])
def test_first_suspend(benchmark: Any, state: State, switch: Switch, note: Note, warm: bool) -> None:
    """The arena is made by the suspend; or ahead of it, in the background, as under the scheduler."""
    if warm:
        warming = switch.warm_up()
        assert warming is not None
        warming.join()
    gc.collect()  # what former benchmarks left is not this suspend's to collect
    before = page_faults()
    benchmark.pedantic(switch.suspend, kwargs={"boundary": 1}, rounds=1)
    faults = page_faults() - before
    record = switch.resume()
    assert record.cold is not warm
    note(**{stage: getattr(record, stage) for stage in SUSPEND_STAGES}, page_faults=faults)


def test_torch_save(benchmark: Any, state: State, tmpfs: Path, note: Note, rounds: int) -> None:
    benchmark.pedantic(lambda: torch.save(state.state_dict(), tmpfs / "state.pt"), rounds=rounds)


def test_safetensors(benchmark: Any, state: State, tmpfs: Path, note: Note, rounds: int) -> None:
    tensors = {str(number): tensor.detach() for number, tensor in enumerate(state.tensors)}
    benchmark.pedantic(lambda: save_file(tensors, tmpfs / "state.safetensors"), rounds=rounds)


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoint(benchmark: Any, state: State, tmpfs: Path, note: Note, rounds: int) -> None:
    def save() -> None:
        shutil.rmtree(tmpfs / "dcp", ignore_errors=True)
        dcp.save(state.state_dict(), checkpoint_id=tmpfs / "dcp", no_dist=True)

    benchmark.pedantic(save, rounds=rounds)


@pytest.mark.parametrize("state", ["frozen-base"], indirect=True)
@pytest.mark.parametrize("changed", ["everything", "adapters"])
def test_copy_of_a_frozen_base(
    benchmark: Any, state: State, switch: Switch, note: Note, changed: str
) -> None:
    """What the copy takes when the base has changed, too, and when it has not."""
    records: list[SwitchRecord] = []

    def train() -> None:
        state.train()
        if changed == "everything":
            with torch.no_grad():
                for parameter in state.base.parameters():
                    parameter.add_(1e-3)

    def cycle() -> None:
        records.append(switch.suspend(boundary=len(records) + 1))
        switch.resume()

    for _ in range(5):
        train()
        cycle()
    del records[:]
    benchmark.pedantic(cycle, setup=train, rounds=9)
    copies = [record.copy_out_s for record in records]
    note(copy_out_s=median(copies), shortest_copy_out_s=min(copies), paths=dict(records[-1].copy_out.paths))
