"""State beside ``state_dict``: a restarted job ends as an undisturbed one, or says what forbids it.

A "process" here is a fresh set of objects, and a job with a runtime of its own, as in test_progress.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpuslice.config import Settings
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.job import Job
from gpuslice.runtime.runtime import Runtime

from . import attribute_cases as cases

EPOCHS = 4
#: Boundaries of the batches of four epochs, drawn among: a life ends there.
DRAWS = 3


class KilledError(Exception):
    """The process is gone."""


class Life:
    """One process: its objects, its job, and where it dies."""

    def __init__(
        self,
        directory: Path,
        *,
        optimizer: str = "",
        loader: str = "",
        attached: bool = True,
        workers: int = 0,
        unfreezes: bool = False,
    ) -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        settings = Settings(ramdisk_dir=str(directory), ramdisk_limit="1G")
        self.runtime = Runtime(settings, RankIdentity(), BoundaryCounter())
        self.model = nn.Sequential(nn.Linear(cases.WIDTH, 3), cases.Counting(), nn.Linear(3, 1))
        self.optimizer = (cases.OPTIMIZERS[optimizer][0] if optimizer else torch.optim.SGD)(
            (self.model[0] if unfreezes else self.model).parameters(),
            **({} if optimizer else {"lr": 0.05, "momentum": 0.9}),
        )
        self.unfreezes = unfreezes
        rate = cases.Rate()
        schedules = torch.optim.lr_scheduler
        self.scheduler: torch.optim.lr_scheduler.LRScheduler = (
            schedules.ExponentialLR(self.optimizer, 0.8)
            if unfreezes
            else schedules.LambdaLR(self.optimizer, lambda epoch: rate(epoch))
        )
        self.stopper = cases.Stopper(self.model)
        if loader:
            self.loader = cases.LOADERS[loader][0]()
        else:
            self.loader = DataLoader(cases.Numbers(), batch_size=3, shuffle=True, num_workers=workers)
        named = {"model": self.model, "optimizer": self.optimizer, "stopper": self.stopper}
        named |= {"scheduler": self.scheduler} | ({"loader": self.loader} if attached else {})
        self.job = Job(self.runtime, named)
        self.runtime.attached = self.job
        self.path: Path | None = None
        self.obstacle = ""

    def run(self, die_at: int | None = None) -> str:
        """Train; die at the end of a batch. Returns what the model is in the end."""
        seen = 0
        for epoch in self.job.epochs(EPOCHS):
            if self.unfreezes and epoch == 1:
                self.optimizer.add_param_group({"params": self.model[2].parameters(), "lr": 0.01})
            for batch in self.job.batches(self.loader):
                self._step(batch)
                seen += 1
                if seen == die_at:
                    self.runtime.suspension.suspend(explicit=True)
                    self.runtime.suspension.resume()
                    assert self.runtime.suspension.switch.snapshot is not None
                    self.path, self.obstacle = self.runtime.suspension.switch.snapshot.path, self.job.obstacle
                    assert self.runtime.suspension.switch.snapshot.restartable == (not self.obstacle)
                    raise KilledError
            self.scheduler.step()
            self._change_the_data()
        return self.digest()

    def _step(self, batch: torch.Tensor) -> None:
        loss = self.model(batch).square().mean() + self.model(batch + 0.1).mean() * 0.01
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.stopper(loss.detach())

    def _change_the_data(self) -> None:
        """As a loop does that makes its data harder, or weights its rows."""
        sampler: Any = self.loader.sampler
        if hasattr(sampler, "limit"):
            sampler.limit = min(sampler.limit + 3, cases.ROWS - 2)
        if isinstance(getattr(sampler, "weights", None), torch.Tensor):
            sampler.weights[torch.randint(cases.ROWS, ())] += 20

    def digest(self) -> str:
        weights = [bytes(p.detach().numpy().tobytes()).hex() for p in self.model.parameters()]
        return " ".join((*weights, str(len(self.stopper.log)), str(self.model[1].calls)))


Begin = Callable[..., Life]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    lives: list[Life] = []

    def begin(**how: Any) -> Life:
        lives.append(Life(tmp_path / "ramdisk", **how))
        return lives[-1]

    yield begin
    for life in lives:
        life.runtime.storage.store.close(keep=False)


def continued(begin: Begin, *die_at: int, **how: Any) -> tuple[str, str]:
    """Return what a run that dies so often ends with, and what forbade its restart, if something did."""
    life = begin(**how)
    for steps in die_at:
        with pytest.raises(KilledError):
            life.run(steps)
        assert life.path is not None
        if life.obstacle:
            return "", life.obstacle
        path, life = life.path, begin(**how)
        life.job.restore(path)
    return life.run(), ""


def lives(name: str) -> list[list[int]]:
    """Return after how many batches of each life a run dies, drawn by the case's name."""
    drawn = random.Random(name)
    return [[drawn.randint(1, 7)], [drawn.randint(2, 5), drawn.randint(1, 3)]]


def check(begin: Begin, name: str, forbidden: str, **how: Any) -> None:
    whole = begin(**how).run()
    for die_at in lives(name):
        digest, obstacle = continued(begin, *die_at, **how)
        if forbidden:
            with pytest.raises(AssertionError, match=forbidden):
                raise AssertionError(obstacle)
        else:
            assert obstacle == ""
            assert digest == whole, f"dies after {die_at}"


@pytest.mark.parametrize("name", cases.OPTIMIZERS)
def test_an_optimizer_with_attributes(begin: Begin, name: str) -> None:
    check(begin, name, cases.OPTIMIZERS[name][1], optimizer=name)


@pytest.mark.parametrize("name", cases.LOADERS)
def test_a_loader_with_attributes(begin: Begin, name: str) -> None:
    check(begin, name, cases.LOADERS[name][1], loader=name, attached=True)


@pytest.mark.parametrize("name", ["by epoch", pytest.param("batches", marks=pytest.mark.repeats), "stream"])
def test_a_loader_with_attributes_that_is_not_attached(begin: Begin, name: str) -> None:
    """One whose sampler, batch sampler or dataset has them."""
    check(begin, name, "", loader=name, attached=False)


@pytest.mark.parametrize("die_at", [[3], [5, 1], [2, 9]])
def test_a_group_that_is_added_later(begin: Begin, die_at: list[int]) -> None:
    whole = begin(unfreezes=True).run()
    assert continued(begin, *die_at, unfreezes=True) == (whole, "")


def test_workers_and_what_they_fetch_again(begin: Begin) -> None:
    whole = begin(workers=1).run()
    assert continued(begin, 6, workers=1) == (whole, "")
