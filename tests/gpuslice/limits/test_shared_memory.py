"""What is added to torch's errors about a full /dev/shm."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice.limits.shared_memory import explain


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that its workers are "
        "out of shared memory. Please try to raise your shared memory limit.",
        "unable to write to file </torch_7_1_0>: No space left on device (28)",
        "unable to allocate shared memory(shm) for file </torch_7_21_1>: No space left on device (28)",
    ],
)
def test_loader_workers_without_room_hear_of_the_ramdisk(shm: Path, tmp_path: Path, text: str) -> None:
    if not str(shm).startswith("/dev/shm"):
        pytest.skip("there is no /dev/shm")
    note = explain(RuntimeError(text), shm / "ram")
    assert note.startswith(f"gpuslice: the RAM disk {shm / 'ram'} and the batches of loader workers share ")
    assert "--shm-size" in note
    assert "GPUSLICE_RAMDISK_DIR" in note
    if tmp_path.stat().st_dev != shm.stat().st_dev:
        assert not explain(RuntimeError(text), tmp_path / "ram")


def test_other_errors_are_left_alone(shm: Path) -> None:
    assert not explain(RuntimeError("no space left"), shm)
