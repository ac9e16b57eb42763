"""A made-up trainer that fetches a batch ahead: it is killed, and goes on with the same batches and draws."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from gpuslice.config import Settings
from gpuslice.errors import RefusedSnapshotError
from gpuslice.frameworks.framework_job import FrameworkJob
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime import trainings
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.runtime import Runtime
from gpuslice.runtime.stopping import Obstacle

BATCHES = 6


class Noise(Dataset[torch.Tensor]):
    """Draws a random number for each item, from the process's generator."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.rand(1) + number


class Ahead:
    """Hands out the batches of a loader, and has fetched the next one by then."""

    def __init__(self, loader: DataLoader[torch.Tensor]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[torch.Tensor]:
        batches = iter(self.loader)
        current = next(batches)
        for following in batches:
            yield current
            current = following
        yield current


class Callback:
    """Counts steps."""

    def __init__(self) -> None:
        self.steps = 0


class FakeTrainer:
    """A trainer of one epoch. Its weight is its only state; it draws between two fetches, as dropout does."""

    def __init__(self, process: Runtime, writer: str = "fake 1.0") -> None:
        torch.manual_seed(3)
        self.weight, self.done, self.callback = 0.0, 0, Callback()
        self.data = Noise()
        self.loader = Ahead(DataLoader(self.data, shuffle=True))
        kept = {"callback": self.callback, "data": [self.data]}
        self.job = FrameworkJob(process, writer, self._save, kept)

    def _save(self, directory: Path) -> None:
        (directory / "part").mkdir()
        (directory / "part" / "weight").write_text(f"{self.weight!r} {self.done}")

    def train(self, until: int = BATCHES) -> float:
        """Train for ``until`` batches in all, and return the weight."""
        self.job.attach(torch.device("cpu"))
        if self.job.checkpoint is None:
            self.job.begin_pass(self.loader)
            batches = iter(self.loader)
        else:
            weight, done = (self.job.checkpoint / "part" / "weight").read_text().split()
            self.weight, self.done = float(weight), int(done)
            batches = self.job.replay(self.loader, self.done, 1)
        while self.done < until:
            self.weight = self.weight * 0.5 + next(batches).item() + torch.rand(1).item()
            self.done += 1
            self.callback.steps += 1
            self.job._process.boundaries.steps += 1
            self.job.end_step()
            self.job.pass_safe_point()
        return self.weight


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(ramdisk_dir=str(tmp_path / "ramdisk"), job="k")


def process(settings: Settings, every: int = 1) -> Runtime:
    job = Runtime(settings, RankIdentity(), BoundaryCounter())
    job.saving.every(every)
    return job


@pytest.fixture
def undisturbed(tmp_path: Path) -> Iterator[float]:
    other = process(Settings(ramdisk_dir=str(tmp_path / "other"), job="k"), every=100)
    yield FakeTrainer(other).train()
    trainings.close(other)


def die(job: Runtime) -> None:
    """Leave what a killed process leaves, with its last checkpoint whole."""
    job.checkpoints.settle()
    job.storage.abandon()


@pytest.mark.parametrize("killed_at", [1, 2, 4])
def test_a_killed_training_goes_on_with_the_same_batches_and_draws(
    settings: Settings, killed_at: int, undisturbed: float
) -> None:
    first = process(settings)
    FakeTrainer(first).train(killed_at)
    die(first)
    second = process(settings)
    again = FakeTrainer(second)
    assert again.train() == undisturbed
    assert (again.callback.steps, second.boundaries.went_on_from) == (BATCHES, killed_at)
    assert second.boundaries.steps == BATCHES
    assert not list(settings.ramdisk_directory.glob("checkpoint-of-*"))
    trainings.close(second)


def test_what_a_killed_process_left_of_its_files_is_removed(settings: Settings) -> None:
    job = process(settings)
    left = job.storage.ramdisk.directory / "checkpoint-of-999999999-x"
    left.mkdir()
    FakeTrainer(job).train(1)
    assert not left.exists()
    trainings.close(job)


def test_another_version_of_the_framework_is_refused(settings: Settings) -> None:
    first = process(settings)
    FakeTrainer(first).train(2)
    die(first)
    second = process(settings)
    with pytest.raises(RefusedSnapshotError, match=r"by fake 1\.0, and this is fake 2\.0"):
        FakeTrainer(second, "fake 2.0").train()
    trainings.close(second)


def test_a_training_that_cannot_be_saved_says_why_once(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    job = process(settings)
    trainer = FakeTrainer(job)
    trainer.job.refusal = "it is a fake"
    trainer.train()
    assert capsys.readouterr().err.count("job k cannot be restarted: it is a fake") == 1
    assert not job.storage.store.restartable()
    assert not trainer.job.restartable_later
    trainings.close(job)


def test_only_a_suspend_for_another_process_waits_for_the_end_of_a_step(settings: Settings) -> None:
    job = process(settings, every=100)
    trainer = FakeTrainer(job)
    trainer.train(1)
    assert job.suspension.obstacle() is Obstacle.NONE
    assert not trainer.job.restartable(explicit=True)
    assert trainer.job.named_state() == {}
    job.for_restart = True
    assert job.suspension.obstacle() is Obstacle.CHANGE
    job.boundaries.count += 100
    assert job.suspension.obstacle() is Obstacle.NONE
    trainings.close(job)
