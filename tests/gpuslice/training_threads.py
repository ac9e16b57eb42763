"""Trainings in other threads than the main one, which waits in many ways; each prints a digest."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import multiprocessing.pool
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def problem(seed: int) -> tuple[nn.Module, TensorDataset]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    x = torch.randn(64, 16, generator=generator)
    return model, TensorDataset(x, x.sum(1, keepdim=True))


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:12]


def train(
    seed: int = 0,
    epochs: int = 2,
    batches: Iterable[Any] = (),
    tell: Callable[[torch.Tensor], object] = lambda loss: None,
) -> str:
    model, data = problem(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(epochs):
        for x, y in batches or DataLoader(data, batch_size=8):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tell(loss)
    return digest(model)


def in_thread(*arguments: Any, daemon: bool = False, **more: Any) -> tuple[threading.Thread, list[str]]:
    """Train in a thread, which leaves the digest in a list."""
    found: list[str] = []
    thread = threading.Thread(
        target=lambda: found.append(train(*arguments, **more)), name="training", daemon=daemon
    )
    thread.start()
    return thread, found


def joined() -> str:
    thread, found = in_thread()
    thread.join()
    return found[0]


def polled() -> str:
    thread, found = in_thread(daemon=True)
    while thread.is_alive():
        time.sleep(0.01)
    return found[0]


def executor() -> str:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(train).result()


def metrics() -> tuple[str, str]:
    losses: queue.Queue[float] = queue.Queue()
    thread, found = in_thread(tell=lambda loss: losses.put(float(loss.detach())))
    total = sum(losses.get() for _ in range(16))
    thread.join()
    return found[0], f"{total:.6f}"


def event_loop() -> str:
    async def main() -> str:
        return await asyncio.to_thread(train)

    return asyncio.run(main())


def folds() -> list[str]:
    with multiprocessing.pool.ThreadPool(1) as pool:
        return pool.map(train, range(3))


def two_at_once() -> list[str]:
    with multiprocessing.pool.ThreadPool(2) as pool:
        return pool.map(train, range(2))


def main_first() -> tuple[str, ...]:
    first = train(1)
    thread, found = in_thread(2)
    thread.join()
    return first, found[0], train(3)


def main_and_thread() -> tuple[str, str]:
    thread, found = in_thread(4, epochs=4)
    mine = train(5, epochs=4)
    thread.join()
    return mine, found[0]


def main_computes() -> tuple[str, float]:
    thread, found = in_thread(6, epochs=4)
    x = torch.eye(50)
    while thread.is_alive():
        x = x @ torch.eye(50)
    return found[0], float(x.sum())


def prefetched() -> str:
    data = problem(7)[1]
    ready: queue.Queue[Any] = queue.Queue(2)

    def fetch() -> None:
        for batch in DataLoader(data, batch_size=4):
            ready.put(batch)
        ready.put(None)

    threading.Thread(target=fetch, name="prefetch").start()
    return train(7, 1, iter(ready.get, None))


def loaderless() -> str:
    batch = problem(8)[1].tensors
    thread, found = in_thread(8, 1, [batch] * 40)
    thread.join()
    return found[0]


for shape in (
    joined,
    polled,
    executor,
    metrics,
    event_loop,
    folds,
    two_at_once,
    main_first,
    main_and_thread,
    main_computes,
    prefetched,
    loaderless,
):
    print(shape.__name__, shape())
