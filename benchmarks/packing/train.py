"""A training of so many steps, each with some milliseconds of waiting for data and some of computing.

python train.py STEPS WAIT_MS COMPUTE_MS
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

steps, wait_s, compute_s = int(sys.argv[1]), float(sys.argv[2]) / 1e3, float(sys.argv[3]) / 1e3


class Data(Dataset):
    """Batches that take a while to come."""

    def __len__(self) -> int:
        return steps

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(wait_s)
        return torch.ones(8)


torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
weights = torch.randn(96, 96)
for batch in DataLoader(Data()):
    # Processor time, so that a neighbour on the same core makes it take longer.
    until_s = time.thread_time() + compute_s
    while time.thread_time() < until_s:
        weights = torch.tanh(weights @ weights)
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.6f}")
