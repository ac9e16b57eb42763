"""A training with a state of so many MiB: train.py MIB. It goes on until it is cancelled."""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import gpuslice

model = torch.nn.Linear(16, 1)
model.register_buffer("ballast", torch.rand(int(sys.argv[1]) << 18))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.rand(10_000, 16)), batch_size=1, shuffle=True)
job = gpuslice.attach(model=model, optimizer=optimizer, loader=loader)
for _ in job.epochs(1000):
    for (x,) in job.batches(loader):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        time.sleep(0.02)
