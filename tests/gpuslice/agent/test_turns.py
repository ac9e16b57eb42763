"""Turns without a scheduler: the job's state is away while others train, and back when its turn comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpuslice.agent.turns import Turns, from_settings
from gpuslice.config import Settings
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.launch.step_control import StepControl
from gpuslice.runtime import trainings
from gpuslice.runtime.boundaries import NEVER, BoundaryCounter
from gpuslice.runtime.runtime import Runtime


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Runtime]:
    settings = Settings(
        device="cpu", ramdisk_dir=str(tmp_path / "ramdisk"), profile=str(tmp_path / "profile.json")
    )
    runtime = Runtime(settings, RankIdentity(), BoundaryCounter())
    yield runtime
    trainings.close(runtime)


def test_it_is_suspended_until_its_turn(
    job: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = StepControl.create(tmp_path / "profile.json", takes_turns=True)
    turns = from_settings(job)
    assert isinstance(turns, Turns)
    turns.start()
    assert job.boundaries.stop_at == 0, "it looks at every boundary"
    weights = torch.arange(4096.0)
    assert turns.at_boundary(1) == []
    assert not job.suspension.away
    sizes: list[int] = []

    def await_turn(control: StepControl) -> None:
        sizes.append(weights.untyped_storage().nbytes())
        assert job.suspension.away

    monkeypatch.setattr(StepControl, "await_turn", await_turn)
    others.withdraw()
    turns.at_boundary(2)
    assert sizes == [0], "the memory was free meanwhile"
    assert torch.equal(weights, torch.arange(4096.0))
    turns.finish()
    assert job.boundaries.stop_at == NEVER
    others.close()


def test_only_jobs_of_an_experiment_take_turns(job: Runtime, tmp_path: Path) -> None:
    assert from_settings(job) is None
    assert from_settings(Runtime(Settings(), RankIdentity(), BoundaryCounter())) is None
