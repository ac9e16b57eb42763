"""A training with a state of so many MiB: train.py MIB [STEPS]. Without STEPS it ends when cancelled."""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import gpuslice

model = torch.nn.Linear(16, 1)
model.register_buffer("ballast", torch.rand(int(sys.argv[1]) << 18))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
loader = DataLoader(TensorDataset(torch.rand(batches, 16)), batch_size=1, shuffle=True)
job = gpuslice.attach(model=model, optimizer=optimizer, loader=loader)
for _ in job.epochs(1 if len(sys.argv) > 2 else 1000):
    for (x,) in job.batches(loader):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        time.sleep(0.02)
