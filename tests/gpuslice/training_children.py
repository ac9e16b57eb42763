"""Trainings in child processes of multiprocessing's, by each way to start one, one after another."""

from __future__ import annotations

import hashlib
import multiprocessing

import torch
from torch import nn
from torch.utils.data import DataLoader


def train(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in DataLoader(torch.randn(64, 8), batch_size=8):  # type: ignore[arg-type, var-annotated]
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(how, hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    for how in ("fork", "spawn"):
        child = multiprocessing.get_context(how).Process(target=train, args=(how,))
        child.start()
        child.join()
