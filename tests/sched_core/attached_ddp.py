"""A DistributedDataParallel training that names its state: attached_ddp.py EPOCHS [FILE].

Rank 0 prints the digest of model and optimizer. Before there is FILE, each epoch is slower than the last one,
so that the training does not end while a test still needs it. HELD_CHECKPOINTS is the file of
held_checkpoints.py.
"""

from __future__ import annotations

import gc
import hashlib
import io
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gpuslice

dist.init_process_group("gloo")
rank = dist.get_rank()
if "HELD_CHECKPOINTS" in os.environ:
    import held_checkpoints

    held_checkpoints.arm(Path(os.environ["HELD_CHECKPOINTS"]), rank)
torch.manual_seed(0)
data = TensorDataset(torch.randn(320, 16), torch.randn(320, 1))
layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
model = DistributedDataParallel(layers, gradient_as_bucket_view=True)
optimizer = torch.optim.Adam(model.parameters())
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, batch_size=8, sampler=sampler)
torch.manual_seed(rank)  # dropout is each rank's own
job = gpuslice.attach(model=model, optimizer=optimizer, loader=loader)
enough = Path(sys.argv[2])
for epoch in job.epochs(int(sys.argv[1])):
    sampler.set_epoch(epoch)
    for inputs, targets in job.batches(loader):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if not enough.exists():
            time.sleep(0.1 * 2 ** (epoch / 3))
state = io.BytesIO()
torch.save([model.state_dict(), optimizer.state_dict()], state)
if rank == 0:
    os.write(1, f"digest {hashlib.sha256(state.getvalue()).hexdigest()}\n".encode())
# First, or the reducer may be the last to hold the group: torch then joins gloo's threads with the GIL held,
# for which one of them may wait. Not later, either: as Python is finalized that aborts.
del model, optimizer, layers
gc.collect()
dist.destroy_process_group()
