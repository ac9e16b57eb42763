"""An ordinary DistributedDataParallel training; rank 0 prints the digest of model and optimizer.

Words: how many epochs, a file before which it does not begin, and one before which it goes slowly from the
second epoch on, so that it would take minutes; without the files it does neither.
"""

from __future__ import annotations

import gc
import hashlib
import io
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
data = TensorDataset(torch.randn(800, 64), torch.randn(800, 1))
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
model = DistributedDataParallel(layers, gradient_as_bucket_view=True)
optimizer = torch.optim.Adam(model.parameters())
begin, enough = map(Path, sys.argv[2:] or (__file__, __file__))
while not begin.exists():
    time.sleep(0.01)
for epoch in range(int(sys.argv[1])):
    for inputs, targets in DataLoader(data, batch_size=16, shuffle=True):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch and not enough.exists():
            time.sleep(0.2)
state = io.BytesIO()
torch.save([model.state_dict(), optimizer.state_dict()], state)
if rank == 0:
    print("digest", hashlib.sha256(state.getvalue()).hexdigest())
# First, or the reducer may be the last to hold the group: torch then joins gloo's threads with the GIL held,
# for which one of them may wait. Not later, either: as Python is finalized that aborts.
del model, optimizer, layers
gc.collect()
dist.destroy_process_group()
