"""Where scripts keep state: closures, globals, dataclasses, generators, threads, other processes."""

from __future__ import annotations

import queue
import random
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from .registry import BOUNDARIES, Loop, batch, case, loss_of, mlp


@case
def recurrent_state() -> Loop:
    """A hidden state in plain variables, handed from batch to batch."""
    network, head = torch.nn.LSTM(8, 64, num_layers=2, dropout=0.1), torch.nn.Linear(64, 1)
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()])
    hidden, cell = torch.zeros(2, 4, 64), torch.zeros(2, 4, 64)
    for _ in range(BOUNDARIES):
        output, (hidden, cell) = network(torch.randn(5, 4, 8), (hidden.detach(), cell.detach()))
        loss = head(output).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, hidden, cell, network, head, optimizer


GLOBAL: dict[str, torch.Tensor] = {}


@dataclass
class Statistics:
    """Running numbers, as scripts keep them."""

    mean: torch.Tensor = field(default_factory=lambda: torch.zeros(300))
    history: list[torch.Tensor] = field(default_factory=list)


@case
def odd_places() -> Loop:
    GLOBAL["moving"] = torch.zeros(3000)
    statistics, nested = Statistics(), {"a": [({"b": torch.randn(2000)},)]}

    def make_counter() -> Any:
        count = torch.zeros(5000)

        def advance() -> torch.Tensor:
            count.add_(torch.randn(5000))
            return count.clone()

        return advance

    advance = make_counter()
    for _ in range(BOUNDARIES):
        GLOBAL["moving"] += advance()[:3000]
        statistics.mean.lerp_(torch.randn(300), 0.5)
        statistics.history.append(statistics.mean.clone())
        nested["a"][0][0]["b"].add_(1)
        yield GLOBAL, statistics, nested, advance
    GLOBAL.clear()


@case
def generators() -> Loop:
    """Explicit generators beside the shared ones."""
    own, numpys = torch.Generator().manual_seed(1), np.random.default_rng(2)
    pythons, legacy = random.Random(3), np.random.RandomState(4)
    for _ in range(BOUNDARIES):
        drawn = [torch.rand(3, generator=own), numpys.random(3), pythons.gauss(0, 1), legacy.normal()]
        shared = [torch.rand(3), np.random.normal(), random.gauss(0, 1)]
        yield drawn, shared, own, numpys, pythons, legacy


def _fit(loader: DataLoader[Any]) -> Loop:
    model = mlp(dropout=True)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            yield loss, inputs, labels, model, optimizer


class Augmented(Dataset[Any]):
    """Samples with noise of the worker that makes them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((32,), float(index)) + torch.randn(32) + random.random(), index % 4


@case
def loader() -> Loop:
    inputs, labels = batch()
    yield from _fit(DataLoader(TensorDataset(inputs, labels), batch_size=4, shuffle=True))


@case
def loader_with_workers() -> Loop:
    yield from _fit(DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2))


@case
def loader_with_persistent_workers() -> Loop:
    yield from _fit(
        DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    )


@case
def thread_with_tensors() -> Loop:
    """A helper thread that keeps an average and waits for work at every boundary."""
    model, average = mlp(), torch.zeros(32 * 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    work: queue.Queue[torch.Tensor | None] = queue.Queue()
    done = threading.Semaphore(0)

    def keep_average() -> None:
        mine = average
        while (weight := work.get()) is not None:
            mine.lerp_(weight.flatten(), 0.1)
            del weight
            done.release()

    thread = threading.Thread(target=keep_average)
    thread.start()
    try:
        for _ in range(BOUNDARIES):
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            work.put(model[0].weight.detach())
            done.acquire()
            yield loss, model, optimizer, average
    finally:
        work.put(None)
        thread.join()
