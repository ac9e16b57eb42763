"""Loaders of every kind over rows that are noisy as augmented ones are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, WeightedRandomSampler

ROWS = 12


class Rows(Dataset[torch.Tensor]):
    """Rows with noise from all three libraries, as augmentation has it."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return torch.full((3,), index / ROWS + noise)


class Stream(IterableDataset[torch.Tensor]):
    """A stream that draws as it goes, shared out among workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, ROWS, step):
            yield Rows()[index]


class Stateful:
    """A loader that knows how to continue by itself, as torchdata's do."""

    def __init__(self) -> None:
        self.at = 0
        self.order: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], list(state["order"])

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.order = self.order or torch.randperm(4).tolist()
        while self.at < 4:
            self.at += 1
            yield torch.full((3, 3), self.order[self.at - 1] + random.random())
        self.at, self.order = 0, []


def _loader(**options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Rows(), batch_size=3, **options)


def _seed() -> int:
    return random.randrange(99)


class Noisy(Rows):
    """Draws in a transform whose generator only a closure holds."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(_seed())
        self.transforms = [lambda row: row + torch.rand(3, generator=generator)]

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transforms[0](super().__getitem__(index))


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: _loader(shuffle=True),
    "generator": lambda: _loader(shuffle=True, generator=torch.Generator().manual_seed(_seed())),
    "closure": lambda: DataLoader(Subset(Noisy(), range(ROWS)), batch_size=3),
    "weighted": lambda: _loader(sampler=WeightedRandomSampler(range(1, ROWS + 1), ROWS)),
    "stream": lambda: DataLoader(Stream(), batch_size=3),
    "workers": lambda: _loader(shuffle=True, num_workers=2),
    "persistent": lambda: _loader(shuffle=True, num_workers=1, persistent_workers=True),
    "stream workers": lambda: DataLoader(Stream(), batch_size=3, num_workers=2),
    "list": lambda: [torch.full((3, 3), float(row)) for row in range(4)],
    "stateful": Stateful,
}
