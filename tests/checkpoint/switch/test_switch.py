"""The transaction: complete, or as if nothing had happened; and everything is accounted for."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from gpuslice.checkpoint.gate import NoGate
from gpuslice.checkpoint.named import process_rng
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import (
    CorruptSnapshotError,
    DeviceMemoryError,
    RamDiskFullError,
    RollbackError,
    SuspendedStateError,
    SuspendRefusedError,
)
from gpuslice.kernels.null import NullDevice
from gpuslice.types import DeviceName

from ...virtual_clock import VirtualClock
from ..harness import Broken, FaultyDevice, Job, SpyGate, digest, disturb, flip_a_byte

KEYS = {
    "boundary",
    "route",
    "bytes_found",
    "bytes_copied",
    "bytes_freed",
    "quiesce_s",
    "copy_out_s",
    "publish_s",
    "free_s",
    "parked_s",
    "reserve_s",
    "copy_in_s",
    "gb_per_s_out",
    "gb_per_s_in",
    "rss_before_bytes",
    "rss_parked_bytes",
    "rss_after_bytes",
}


def test_a_switch_changes_nothing(store: JobStore, job: Job) -> None:
    before = job.digest()
    switch = Switch(FaultyDevice(), store, gate=SpyGate())
    switch.suspend(boundary=1)
    disturb()
    switch.resume()
    assert job.digest() == before


class Watching(FaultyDevice):
    """Notes whether the collector is on, at every step of a switch."""

    def __init__(self, **failures: int) -> None:
        super().__init__(**failures)
        self.collecting: list[bool] = []

    def _step(self, name: str) -> bool:
        self.collecting.append(gc.isenabled())
        return super()._step(name)


def test_the_collector_rests_while_a_job_is_switched_and_no_longer(store: JobStore, job: Job) -> None:
    before, device = job.digest(), Watching(synchronize=1, copy_in=1)
    switch = Switch(device, store, gate=SpyGate())
    with pytest.raises(Broken):
        switch.suspend(boundary=1)
    assert gc.isenabled()
    switch.suspend(boundary=1)
    assert gc.isenabled()
    with pytest.raises(Broken):
        switch.resume()
    assert gc.isenabled()
    switch.resume()
    assert gc.isenabled()
    assert {"synchronize", "copy_out", "free", "copy_in"} <= set(device.calls)
    assert not any(device.collecting)
    assert job.digest() == before


def test_memory_is_gone_while_parked(store: JobStore, job: Job) -> None:
    switch = Switch(FaultyDevice(), store, gate=SpyGate())
    switch.suspend(boundary=1)
    assert switch.suspended
    assert job.model[0].weight.untyped_storage().nbytes() == 0
    assert not job.array[1000:-1000].any()
    switch.resume()
    assert not switch.suspended


def test_a_record_has_the_documented_keys_and_adds_up(store: JobStore, job: Job) -> None:
    switch = Switch(FaultyDevice(), store, gate=SpyGate())
    switch.suspend(boundary=7)
    row = switch.resume().as_dict()
    assert row.keys() >= KEYS
    assert row["boundary"] == 7
    assert row["bytes_found"] == row["bytes_freed"] + row["bytes_resident"]  # type: ignore[operator]
    assert row["bytes_copied"] == row["bytes_freed"]
    assert all(row[key] > 0 for key in ("copy_out_s", "publish_s", "parked_s", "copy_in_s", "gb_per_s_in"))  # type: ignore[operator]
    state_bytes = sum(p.nbytes for p in job.model.parameters()) * 3 + job.array.nbytes
    assert row["bytes_found"] >= state_bytes  # type: ignore[operator]


def test_the_first_use_of_an_arena_is_cold(store: JobStore, job: Job) -> None:
    switch = Switch(FaultyDevice(), store, gate=SpyGate())
    cold = []
    for boundary in range(4):
        cold.append(switch.suspend(boundary=boundary).cold)
        switch.resume()
    assert cold == [True, False, False, False]


@pytest.mark.parametrize("stage", ["synchronize", "copy_out", "free", "release_caches"])
def test_a_failing_suspend_leaves_the_old_state(store: JobStore, job: Job, stage: str) -> None:
    before, gate = job.digest(), SpyGate()
    device = FaultyDevice(**{stage: 1})
    switch = Switch(device, store, gate=gate)
    with pytest.raises(Broken, match=stage):
        switch.suspend(boundary=1)
    assert not switch.suspended
    assert gate.closed == 0
    assert job.digest() == before
    switch.suspend(boundary=2)
    switch.resume()
    assert job.digest() == before


def test_a_failing_publish_leaves_the_old_state(
    store: JobStore, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, switch = job.digest(), Switch(FaultyDevice(), store)
    with monkeypatch.context() as patch:
        patch.setattr("gpuslice.checkpoint.format.safetensors_header.pack_digests", _broken)
        with pytest.raises(Broken):
            switch.suspend(boundary=1)
    assert job.digest() == before
    switch.suspend(boundary=1)
    switch.resume()


def _broken(*_: object) -> None:
    raise Broken("publish")


def test_a_full_ram_disk_leaves_the_old_state(tmp_path: Path, job: Job) -> None:
    before = job.digest()
    with RamDisk(tmp_path / "small", 1 << 20).open_store(None) as store:
        switch = Switch(FaultyDevice(), store, gate=SpyGate())
        with pytest.raises(RamDiskFullError):
            switch.suspend(boundary=1)
        assert not switch.suspended
    assert job.digest() == before


def test_out_of_memory_at_resume_can_be_tried_again(store: JobStore, job: Job) -> None:
    before, gate = job.digest(), SpyGate()
    switch = Switch(FaultyDevice(reserve=2), store, gate=gate)
    switch.suspend(boundary=1)
    for _ in range(2):
        with pytest.raises(DeviceMemoryError):
            switch.resume()
        assert switch.suspended
        assert gate.closed == 1
        assert job.model[0].weight.untyped_storage().nbytes() == 0
    switch.resume()
    assert gate.closed == 0
    assert job.digest() == before


def test_memory_is_there_for_pages_that_were_dropped_or_nothing_is_taken(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.ones(1 << 20)
    kept = torch.from_numpy(array)
    switch = Switch(FaultyDevice(), store, gate=SpyGate())
    switch.suspend(boundary=1)
    with monkeypatch.context() as patch:
        patch.setattr("gpuslice.kernels.host.device.available_bytes", lambda: 1 << 20)
        with pytest.raises(DeviceMemoryError, match="lacks the memory"):
            switch.resume()
    switch.resume()
    assert kept.sum().item() == 1 << 20


def test_a_failing_copy_in_gives_the_memory_back(store: JobStore, job: Job) -> None:
    before = job.digest()
    switch = Switch(FaultyDevice(copy_in=1), store)
    switch.suspend(boundary=1)
    with pytest.raises(Broken):
        switch.resume()
    assert switch.suspended
    assert job.model[0].weight.untyped_storage().nbytes() == 0
    switch.resume()
    assert job.digest() == before


def test_a_failed_undo_of_a_suspend_is_an_error_of_its_own(store: JobStore, job: Job) -> None:
    gate = SpyGate()
    switch = Switch(FaultyDevice(free=1, copy_in=1), store, gate=gate)
    with pytest.raises(RollbackError, match=r"free.*copy_in"):
        switch.suspend(boundary=1)
    check_lost(switch, gate)


def test_a_failed_undo_of_a_resume_is_an_error_of_its_own(store: JobStore, job: Job) -> None:
    device, gate = FaultyDevice(copy_in=1), SpyGate()
    switch = Switch(device, store, gate=gate)
    switch.suspend(boundary=1)
    device.failures["free"] = 1
    with pytest.raises(RollbackError, match=r"copy_in.*free"):
        switch.resume()
    check_lost(switch, gate)


def check_lost(switch: Switch, gate: SpyGate) -> None:
    """Nobody may touch the state any more: the gate never opens, and no other try is made."""
    assert (gate.closed, gate.is_shut) == (1, True)
    with pytest.raises(RollbackError, match="undoing it"):
        switch.suspend(boundary=2)
    with pytest.raises(RollbackError, match="undoing it"):
        switch.resume()
    assert (gate.closed, gate.is_shut) == (1, True)


def test_a_flipped_byte_is_found_and_nothing_stays_taken_back(store: JobStore, job: Job) -> None:
    switch = Switch(FaultyDevice(), store, gate=SpyGate())
    switch.suspend(boundary=1)
    assert switch.snapshot is not None
    intact = switch.snapshot.path.read_bytes()
    flip_a_byte(switch.snapshot, "float64 [100000]")
    with pytest.raises(CorruptSnapshotError, match=r"float64 \[100000\]"):
        switch.resume()
    assert switch.suspended
    assert job.model[0].weight.untyped_storage().nbytes() == 0
    with switch.snapshot.path.open("r+b") as file:
        file.write(intact)
    switch.resume()  # what else lives in this process, other tests' tensors too, has its bytes again


def test_states_must_alternate(store: JobStore, job: Job) -> None:
    switch = Switch(FaultyDevice(), store, gate=SpyGate())
    with pytest.raises(SuspendedStateError, match="not suspended"):
        switch.resume()
    switch.suspend(boundary=1)
    with pytest.raises(SuspendedStateError, match="already"):
        switch.suspend(boundary=2)
    switch.resume()


def test_without_a_gate_another_thread_means_not_alone() -> None:
    others = {thread for thread in threading.enumerate() if not thread.name.startswith("gpuslice-")}
    alone = others == {threading.current_thread()}
    assert NoGate().alone == alone
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait, name=name) for name in ("gpuslice-of-ours", "of-theirs")]
    threads[0].start()
    assert NoGate().alone == alone
    threads[1].start()
    assert not NoGate().alone
    stop.set()
    for thread in threads:
        thread.join()


def test_the_gate_is_open_while_the_script_goes_on(store: JobStore, job: Job) -> None:
    before, gate = job.digest(), SpyGate()
    device = FaultyDevice(copy_in=1)
    switch = Switch(device, store, gate=gate)
    record = switch.suspend(boundary=1, script_goes_on=True)
    assert gate.closed == 0
    assert record.bytes_freed > 0
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        job.model[0].weight.sum()
    with pytest.raises(Broken):
        switch.resume()
    assert gate.closed == 0
    assert switch.suspended
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        job.tensor.sum()
    switch.resume()
    assert gate.closed == 0
    assert job.digest() == before


def test_a_thread_that_does_not_stop_has_the_resume_tried_again(store: JobStore, job: Job) -> None:
    class Stuck(SpyGate):
        def close(self) -> None:
            if switch.suspended and not tried:
                tried.append(True)
                raise SuspendRefusedError("a thread does not leave torch")
            super().close()

    before, tried = job.digest(), list[bool]()
    switch = Switch(FaultyDevice(), store, gate=Stuck())
    switch.suspend(boundary=1, script_goes_on=True)
    with pytest.raises(SuspendRefusedError):
        switch.resume()
    switch.resume()
    assert job.digest() == before


def test_a_null_device_moves_nothing(store: JobStore, job: Job) -> None:
    before, clock = job.digest(), VirtualClock()
    switch = Switch(NullDevice(DeviceName("null", 0)), store, clock=clock)
    switch.suspend(boundary=1)
    clock.advance_to(clock.now() + 100)
    record = switch.resume()
    assert record.parked_s == pytest.approx(100)
    assert job.digest() == before


def test_shared_generators_are_put_back(store: JobStore) -> None:
    switch = Switch(FaultyDevice(), store, gate=SpyGate())
    before = digest(process_rng.capture())
    switch.suspend(boundary=1)
    disturb()
    assert digest(process_rng.capture()) != before
    switch.resume()
    assert digest(process_rng.capture()) == before


def test_version_counters_stay(store: JobStore, job: Job) -> None:
    before = [parameter._version for parameter in job.model.parameters()]
    switch = Switch(FaultyDevice(), store, gate=SpyGate())
    switch.suspend(boundary=1)
    switch.resume()
    assert [parameter._version for parameter in job.model.parameters()] == before


def test_a_switch_keeps_nothing_of_the_job_alive(store: JobStore) -> None:
    switch, job = Switch(FaultyDevice(), store), Job()
    switch.suspend(boundary=1)
    switch.resume()
    reference = weakref.ref(job.tensor)
    del job
    gc.collect()
    assert reference() is None


REALISTIC = """
import sys
from pathlib import Path
import torch
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.types import DeviceName
layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.from_numpy(torch.randn(2000, 500).numpy())
with RamDisk(Path(sys.argv[1])).open_store(None) as store:
    switch = Switch(CpuDevice(DeviceName("cpu", None)), store)
    for boundary in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(8, 16, 128)).square().mean().backward()
        optimizer.step()
        switch.suspend(boundary=boundary)
        record = switch.resume()
        print(record.bytes_found, record.rss_before_bytes - record.rss_parked_bytes)
"""


@pytest.mark.slow
def test_a_parked_job_leaves_the_resident_set(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", REALISTIC, str(tmp_path / "ramdisk")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    switches = [[int(number) for number in line.split()] for line in child.stdout.splitlines()]
    assert len(switches) == 3
    for found_bytes, gone_bytes in switches:
        assert found_bytes > 30e6
        assert gone_bytes >= 0.9 * found_bytes
