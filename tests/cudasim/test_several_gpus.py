"""One process whose model is divided over two GPUs: one snapshot, bit for bit, both GPUs at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import cudasim
import pytest
import torch

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import DeviceMemoryError, SuspendRefusedError
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

from ..gpuslice.conftest import Workshop
from ..patience import PATIENCE_S
from .test_scripts import switches, undisturbed

pytestmark = pytest.mark.two_gpus

MIB = 1 << 20
#: The first layers on one GPU, the last on the other; random numbers are drawn on both.
DIVIDED = """
import hashlib, torch
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(1)
first = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1)).to("cuda:0")
last = nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.2), nn.Linear(256, 1)).to("cuda:1")
optimizer = torch.optim.AdamW([*first.parameters(), *last.parameters()], lr=0.01)
losses = []
for batch in DataLoader(torch.randn(48, 64), batch_size=4, shuffle=True, pin_memory=True):
    hidden = first(batch.to("cuda:0", non_blocking=True))
    loss = last(hidden.to("cuda:1")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
digest = hashlib.sha256(repr(losses).encode())
for part in (first, last):
    for value in part.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
for gpu in (0, 1):
    digest.update(torch.cuda.get_rng_state(gpu).numpy().tobytes())
print(digest.hexdigest())
"""
BOTH = DeviceName.parse("cuda:0+1", several=True)


@pytest.fixture
def switch(tmp_path: Path) -> Iterator[Switch]:
    with RamDisk(tmp_path / "ramdisk", 512 * MIB).open_store(None) as store:
        yield Switch(open_device(BOTH), store)


def on_both() -> list[torch.Tensor]:
    """Tensors that are packed and tensors that are not, on each GPU."""
    sizes = (10, 1000, 9 * MIB)
    return [
        torch.full((size,), 7 * gpu + number, dtype=torch.uint8, device=f"cuda:{gpu}")
        for gpu in (0, 1)
        for number, size in enumerate(sizes)
    ]


def are_whole(tensors: list[torch.Tensor]) -> bool:
    return all(bool((tensor == 7 * (at // 3) + at % 3).all()) for at, tensor in enumerate(tensors))


@pytest.mark.parametrize("route", ["tensor", "vmm"])
def test_a_model_over_two_gpus_ends_as_if_nothing_had_been(
    workshop: Workshop, warm_workshop: Workshop, route: str
) -> None:
    script, report = str(workshop.write("train.py", DIVIDED)), workshop.directory / "report.json"
    words = ("--device", "cuda:0+1", "--route", route, "--suspend-every", "3", "--report", str(report))
    done = workshop.gpuslice_run(*words, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == undisturbed(warm_workshop, script)
    found = switches(report)
    assert len(found) == 4
    assert all(switch["device"] == "cuda:0+1" and switch["route"] == route for switch in found), found


def test_one_snapshot_frees_both_gpus(switch: Switch) -> None:
    tensors = on_both()
    before = [cudasim.used_bytes(gpu) for gpu in (0, 1)]
    record = switch.suspend(boundary=1)
    assert all(was - cudasim.used_bytes(gpu) >= 9 * MIB for gpu, was in enumerate(before))
    assert record.bytes_freed >= 18 * MIB
    assert switch.snapshot is not None
    assert {spec.device for spec in switch.snapshot.storages} >= {"cuda:0", "cuda:1"}
    switch.resume()
    assert are_whole(tensors)


def test_gpus_copy_at_the_same_time(switch: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits, in the middle of its copy, until the other is in the middle of its own."""
    from gpuslice.kernels.cuda.copies import GpuCopy

    tensors, meeting = on_both(), threading.Barrier(2)
    for name in ("out", "back"):
        copy = getattr(GpuCopy, name)

        def meeting_first(self: GpuCopy, *arguments: object, copy: object = copy) -> object:
            meeting.wait(PATIENCE_S)
            return copy(self, *arguments)  # type: ignore[operator]

        monkeypatch.setattr(GpuCopy, name, meeting_first)
    switch.suspend(boundary=1)
    switch.resume()
    assert are_whole(tensors)


def test_memory_that_is_short_on_one_gpu_leaves_nothing_taken_on_the_other(switch: Switch) -> None:
    tensors = on_both()
    switch.suspend(boundary=1)
    before = [cudasim.used_bytes(gpu) for gpu in (0, 1)]
    free_bytes = torch.cuda.mem_get_info(1)[0]
    hog = torch.empty(free_bytes - 8 * MIB, dtype=torch.uint8, device="cuda:1")
    with pytest.raises(DeviceMemoryError):
        switch.resume()
    del hog
    torch.cuda.empty_cache()
    assert [cudasim.used_bytes(gpu) for gpu in (0, 1)] == before
    switch.resume()
    assert are_whole(tensors)


def test_a_state_on_two_gpus_stays_there(switch: Switch) -> None:
    tensors = on_both()
    switch.suspend(boundary=1)
    assert "several GPUs" in switch.obstacle_to_moves()
    with pytest.raises(SuspendRefusedError, match="several GPUs"):
        switch.resume(open_device(DeviceName("cuda", 0)))
    switch.resume()
    assert are_whole(tensors)


def test_who_names_one_gpu_is_told_how_to_name_both(warm_workshop: Workshop) -> None:
    script = str(warm_workshop.write("train.py", DIVIDED))
    done = warm_workshop.gpuslice_run("--device", "cuda:0", "--suspend-every", "3", script)
    assert done.returncode != 0
    assert "--device cuda:0+1" in done.stderr


def test_a_pool_of_the_script_s_own_is_reported_apart(tmp_path: Path) -> None:
    """Its segments stay the script's, as those of recorded graphs do."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.ones(4 * MIB, dtype=torch.uint8, device="cuda:0")
    with RamDisk(tmp_path / "ramdisk", 64 * MIB).open_store(None) as store:
        switch = Switch(open_device(DeviceName("cuda", 0)), store)
        record = switch.suspend(boundary=1)
        assert record.held["graph_pools"] >= 4 * MIB
        assert json.dumps(record.as_dict())
        switch.resume()
    assert inside.sum().item() == 4 * MIB
