"""Epochs and batches go on where a snapshot was taken, whatever the loader, and end bit for bit the same.

A "process" here is a fresh set of objects with other seeds, and a job with a runtime of its own; the random
number generators of the real process are disturbed before each. test_restart.py has real processes.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, dataloader

from gpuslice.checkpoint.named import process_rng
from gpuslice.config import Settings
from gpuslice.errors import RefusedSnapshotError, UsageError
from gpuslice.hooks.hooks import BeforeFetch
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.job import Job
from gpuslice.runtime.runtime import Runtime

from ..loaders import LOADERS, Noisy, Rows

PLAIN_NEXT = dataloader._BaseDataLoaderIter.__next__
EPOCHS = 2


class KilledError(Exception):
    """The process is gone."""


class Process:
    """One life of a training script."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, *, loader: str, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.boundaries = BoundaryCounter()
        settings = Settings(ramdisk_dir=str(directory), ramdisk_limit="1G")
        self.runtime = Runtime(settings, RankIdentity(), self.boundaries)
        self.boundaries.hooked = True
        hook = BeforeFetch(PLAIN_NEXT, self.boundaries.fetching, self.boundaries.thread)
        monkeypatch.setattr(dataloader._BaseDataLoaderIter, "__next__", hook)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.4), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.loader = LOADERS[loader]()
        self.evaluation = [torch.ones(2, 3), torch.zeros(2, 3)]
        self.log: list[float] = []
        named: dict[str, object] = {"log": self.log, "best": 9.0}
        named |= {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        if isinstance(self.loader, DataLoader):
            named["loader"] = self.loader
        self.job = Job(self.runtime, named)
        self.runtime.attached = self.job
        self.path: Path | None = None
        self.restartable: list[bool] = []
        self.die_at: set[int] = set()

    def at_boundary(self, boundary: int) -> tuple[int, ...]:
        """As a controller: suspend, resume, and perhaps die."""
        self.boundaries.stop_at = boundary + 1
        self.restartable.append(self.job.restartable(explicit=False))
        assert self.job.restartable_later
        if boundary in self.die_at:
            self.suspend(explicit=False)
            raise KilledError
        return ()

    def suspend(self, *, explicit: bool) -> None:
        self.runtime.suspension.suspend(explicit=explicit)
        self.runtime.suspension.resume()
        assert self.runtime.suspension.switch.snapshot is not None
        self.path = self.runtime.suspension.switch.snapshot.path

    def run(self, *die_at: int) -> None:
        self.die_at = set(die_at)
        self.boundaries.controller = self
        self.boundaries.stop_at = 1
        for _epoch in self.job.epochs(EPOCHS):
            self.train()
            self.scheduler.step()
            self.evaluate()

    def train(self) -> None:
        self.model.train()
        for batch in self.job.batches(self.loader):
            self.optimizer.zero_grad()
            loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.log.append(loss.item())

    def evaluate(self) -> None:
        self.model.eval()
        for batch in self.job.batches(self.evaluation):
            score = self.model(batch).sum().item()
            self.log.append(score)
            self.job.state["best"] = min(self.job.state["best"], score)

    def digest(self) -> tuple[Any, ...]:
        weights = [parameter.tolist() for parameter in self.model.parameters()]
        draws = (float(torch.rand(())), random.random(), float(np.random.rand()))
        return weights, self.log, self.job.state["best"], draws, self.optimizer.param_groups[0]["lr"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(loader: str = "shuffle", *, seed: int = 1) -> Process:
        started.append(Process(tmp_path / "ramdisk", monkeypatch, loader=loader, seed=seed))
        return started[-1]

    yield begin
    for process in started:
        process.runtime.storage.store.close(keep=False)
        if isinstance(process.loader, DataLoader):
            # Persistent workers must end here: when a collection finds them, torch waits for each in vain.
            process.loader._iterator = None


def whole_run(start: Callable[..., Process], loader: str = "shuffle") -> tuple[Process, tuple[Any, ...]]:
    process = start(loader)
    process.run()
    return process, process.digest()


def continued(start: Callable[..., Process], loader: str, *boundaries: int) -> Process:
    """A run that dies at each of the boundaries and starts again in another process."""
    process = start(loader)
    for life, boundary in enumerate(boundaries):
        try:
            process.run(boundary)
        except KilledError as error:
            # What the frames hold, loader workers above all, must go now and not at some collection.
            traceback.clear_frames(error.__traceback__)
        path = process.path
        assert path is not None
        process = start(loader, seed=100 + life)
        process.job.restore(path)
    process.run()
    return process


@pytest.mark.parametrize("loader", LOADERS)
def test_a_restarted_run_ends_like_an_undisturbed_one(start: Callable[..., Process], loader: str) -> None:
    undisturbed, expected = whole_run(start, loader)
    # Five boundaries in training (the last one finds the loader exhausted), three in evaluation, per epoch.
    assert undisturbed.boundaries.count == EPOCHS * (5 + 3)
    killed = continued(start, loader, 3, 11)
    assert killed.digest() == expected
    assert killed.boundaries.count == undisturbed.boundaries.count


@pytest.mark.parametrize("boundary", [1, 2, 4, 6, 7, 9, 14, 15])
def test_every_kind_of_boundary(start: Callable[..., Process], boundary: int) -> None:
    _, expected = whole_run(start)
    assert continued(start, "shuffle", boundary).digest() == expected


def test_which_boundaries_are_restartable(start: Callable[..., Process]) -> None:
    process = start()
    assert not process.job.restartable_later, "it may have loops of its own"
    process.run()
    assert process.restartable == ([True] * 4 + [False] + [True] * 2 + [False]) * EPOCHS


def test_without_random_states_the_order_differs(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = whole_run(start)
    monkeypatch.setattr(process_rng, "restore", lambda states, gpus=None: None)
    assert continued(start, "workers", 3).digest() != expected
    with pytest.raises(RefusedSnapshotError, match="gives another order than before the restart"):
        continued(start, "shuffle", 3)


def test_without_the_start_of_the_pass_the_order_differs(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuslice.runtime.progress.set_generator_state", lambda generator, state: None)
    with pytest.raises(RefusedSnapshotError, match="gives another order than before the restart"):
        continued(start, "generator", 3)


def order(process: Process, *, stop: int | None = None) -> list[object]:
    """Which (epoch, batch) a loop sees that suspends after its ``stop``-th batch."""
    seen: list[object] = []
    for epoch in process.job.epochs(3):
        for batch in process.job.batches([0, 1, 2]):
            seen.append((epoch, batch))
            if len(seen) == stop:
                process.suspend(explicit=True)
                return seen
    return seen


def test_an_explicit_suspend_ends_the_loop_body(start: Callable[..., Process]) -> None:
    everything = order(start())
    for stop in range(1, len(everything) + 1):
        first, second = start(), start(seed=2)
        seen = order(first, stop=stop)
        assert first.path is not None
        second.job.restore(first.path)
        assert seen + order(second) == everything


def test_an_explicit_suspend_after_the_batches_ends_the_epoch(start: Callable[..., Process]) -> None:
    first, second = start(), start(seed=2)
    for epoch in first.job.epochs(3):
        assert list(first.job.batches("ab")) == ["a", "b"]
        if epoch == 1:
            first.suspend(explicit=True)
            break
    assert first.path is not None
    second.job.restore(first.path)
    assert [(epoch, *second.job.batches("ab")) for epoch in second.job.epochs(3)] == [(2, "a", "b")]


def test_after_the_last_epoch_nothing_is_left(start: Callable[..., Process]) -> None:
    first, second = start(), start(seed=2)
    first.job.state["best"] = 3.0
    for _epoch in first.job.epochs(2):
        list(first.job.batches("ab"))
    first.suspend(explicit=True)
    assert first.path is not None
    second.job.restore(first.path)
    assert list(second.job.epochs(2)) == []
    assert second.job.state["best"] == 3.0
    assert list(second.job.epochs(1)) == [0]


def test_two_loops_of_epochs_and_breaks(start: Callable[..., Process]) -> None:
    def script(process: Process, die_at: int | None) -> list[object]:
        seen: list[object] = []
        for phase in ("warm", "main"):
            for epoch in process.job.epochs(3):
                for batch in process.job.batches(range(5)):
                    if batch == 3 and phase == "warm":
                        break
                    seen.append((phase, epoch, batch))
                    if len(seen) == die_at:
                        process.suspend(explicit=True)
                        return seen
        return seen

    everything = script(start(), None)
    for die_at in (2, 4, 9, 10, 14, 17):
        first, second = start(), start(seed=2)
        seen = script(first, die_at)
        assert first.path is not None
        second.job.restore(first.path)
        assert seen + script(second, None) == everything


def test_batches_without_epochs(start: Callable[..., Process]) -> None:
    def script(process: Process, die_at: int | None) -> list[object]:
        seen: list[object] = []
        for epoch in range(3):
            for batch in process.job.batches("abc"):
                assert process.job.restartable_later
                seen.append((epoch, batch))
                if len(seen) == die_at:
                    process.suspend(explicit=True)
                    return seen
        return seen

    everything = script(start(), None)
    first, second = start(), start(seed=2)
    seen = script(first, 5)
    assert first.path is not None
    second.job.restore(first.path)
    assert seen + script(second, None) == everything


def test_what_runs_on_the_way_is_undone(start: Callable[..., Process]) -> None:
    first, second = start(), start(seed=2)
    for _epoch in first.job.epochs(2):
        list(first.job.batches("ab"))
        first.job.state["best"] -= 1
        for _ in first.job.batches("ab"):
            first.suspend(explicit=True)
            break
        break
    assert first.path is not None
    second.job.restore(first.path)
    for _epoch in second.job.epochs(2):
        assert list(second.job.batches("ab")) == []
        second.job.state["best"] -= 1
        assert not second.job.restartable(explicit=True)
        assert list(second.job.batches("ab")) == ["b"]
        assert second.job.restartable(explicit=True)
        break
    assert second.job.state["best"] == 8.0


def test_nested_passes_and_plain_loops_are_not_restartable(start: Callable[..., Process]) -> None:
    process = start()
    assert not process.job.restartable(explicit=False)
    for _ in process.job.batches("ab"):
        assert process.job.restartable(explicit=True)
        assert not process.job.restartable(explicit=False)
        for _ in process.job.batches("xy"):
            assert not process.job.restartable(explicit=True)
    assert list(process.job.batches("ab")) == ["a", "b"]


def test_a_shorter_loader_is_refused(start: Callable[..., Process]) -> None:
    first, second = start(), start(seed=2)
    for batch in first.job.batches("abcd"):
        if batch == "c":
            first.suspend(explicit=True)
    assert first.path is not None
    second.job.restore(first.path)
    with pytest.raises(RefusedSnapshotError, match="the loader has 2 batches, but had 4"):
        list(second.job.batches("ab"))


def test_a_script_without_the_pass_is_refused(start: Callable[..., Process]) -> None:
    first, second = start(), start(seed=2)
    for _epoch in first.job.epochs(2):
        for _ in first.job.batches("ab"):
            first.suspend(explicit=True)
            break
        break
    assert first.path is not None
    second.job.restore(first.path)
    with pytest.raises(RefusedSnapshotError, match="the script is past"):
        list(second.job.epochs(2))


def impossible() -> torch.Tensor:
    """A state that torch takes: the next word is the last, and two are left. Nobody draws from it here."""
    state = torch.get_rng_state()
    state[8:24] = torch.tensor([3, 0, 0, 0, 1, 0, 0, 0, 111, 2, 0, 0, 0, 0, 0, 0])
    return state


def test_impossible_random_states_of_a_pass_are_refused(start: Callable[..., Process]) -> None:
    first, second = start(), start(seed=2)
    good = torch.get_rng_state()
    torch.set_rng_state(impossible())
    for _ in first.job.batches("ab"):
        torch.set_rng_state(good)
        first.suspend(explicit=True)
    assert first.path is not None
    before = second.digest()[0]
    with pytest.raises(RefusedSnapshotError, match="the process was saved with an impossible"):
        second.job.restore(first.path)
    assert second.digest()[0] == before
    assert list(second.job.batches("ab")) == ["a", "b"]


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ([impossible()], "a generator of the loader was saved with an impossible torch cpu state"),
        ([3], "a generator of the loader was saved with no torch cpu state"),
        ([], "the loader has 1 random number generators, but others were saved"),
        (None, "but others were saved"),
    ],
)
def test_generators_of_the_loader_are_not_set_to_what_nobody_can_go_on_from(
    start: Callable[..., Process], states: object, words: str
) -> None:
    first, second = start("generator"), start("generator", seed=2)
    for _ in first.job.batches(first.loader):
        assert first.job._progress._pass is not None
        first.job._progress._pass.start["own"] = states
        first.suspend(explicit=True)
        break
    assert first.path is not None
    second.job.restore(first.path)
    with pytest.raises(RefusedSnapshotError, match=words):
        next(second.job.batches(second.loader))


UNKNOWN: dict[str, Callable[[], DataLoader[torch.Tensor]]] = {
    "its own": lambda: DataLoader(Rows(), shuffle=True, generator=torch.Generator()),
    "in a closure": lambda: DataLoader(Noisy()),
    "in a partial": lambda: DataLoader(Rows(), collate_fn=partial(max, random.Random(3))),
}


@pytest.mark.parametrize("loader", UNKNOWN.values(), ids=UNKNOWN)
def test_a_loader_with_an_unknown_generator_is_refused(
    start: Callable[..., Process], loader: Callable[[], DataLoader[torch.Tensor]]
) -> None:
    process = start()
    with pytest.raises(UsageError, match="not attached"):
        next(process.job.batches(loader()))
