"""Processes that hold memory of a GPU and are no ranks are named when a rank is to be suspended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from gpuslice.config import Settings
from gpuslice.errors import SuspendRefusedError
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime import foreign_processes
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.runtime import Runtime


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The RAM disk of a job of which this process is one."""
    path = tmp_path / "ramdisk"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("GPUSLICE_LAUNCH", "17")
    monkeypatch.setenv("GPUSLICE_RAMDISK_DIR", str(path))
    monkeypatch.setattr(foreign_processes, "_ranks_pid", 0)
    return path


@pytest.fixture
def uses_cuda(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch does when it initializes CUDA, as far as it concerns us (no GPU here)."""
    monkeypatch.setattr(torch.cuda, "_queued_calls", [])
    foreign_processes.announce_on_cuda()
    for call, _ in torch.cuda._queued_calls:
        call()


@pytest.mark.usefixtures("uses_cuda")
def test_a_process_that_uses_cuda_makes_a_suspend_refused_by_name(directory: Path) -> None:
    with pytest.raises(SuspendRefusedError, match=f"process {os.getpid()} .*none of the job's ranks"):
        foreign_processes.refuse(directory)
    settings = Settings(device="null:0", ramdisk_dir=str(directory))
    job = Runtime(settings, RankIdentity(), BoundaryCounter())
    with pytest.raises(SuspendRefusedError, match="none of the job's ranks"):
        job.suspension.suspend(explicit=True)
    foreign_processes.become_rank()
    foreign_processes.refuse(directory)
    assert list(directory.iterdir()) == []


@pytest.mark.usefixtures("uses_cuda")
def test_other_jobs_processes_and_dead_ones_do_not_count(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own,) = directory.iterdir()
    dead = own.rename(own.with_suffix(".1"))  # that process began at another time
    foreign_processes.refuse(directory)
    assert not dead.exists()
    own.write_text("python serve.py")
    monkeypatch.setenv("GPUSLICE_LAUNCH", "18")
    foreign_processes.refuse(directory)
    assert own.exists()


def test_a_rank_is_not_announced(directory: Path, request: pytest.FixtureRequest) -> None:
    foreign_processes.become_rank()
    request.getfixturevalue("uses_cuda")
    assert list(directory.iterdir()) == []
