"""A loop with Accelerate and ``attach``: what Accelerate has wrapped is attached without its wrappers.

Words: loader workers.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import digest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

import gpuslice


class Rows(torch.utils.data.Dataset):
    """Rows to which noise is added anew whenever they are fetched."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(200, 20), torch.randint(0, 2, (200,))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[number] + 0.1 * torch.randn(20), self.y[number]


set_seed(3)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(20, 32), nn.Dropout(0.2), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
loader = torch.utils.data.DataLoader(Rows(), batch_size=10, shuffle=True, num_workers=int(sys.argv[1]))
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
job = gpuslice.attach(
    model=model, optimizer=optimizer.optimizer, scheduler=scheduler.scheduler, loader=loader
)
job.state.setdefault("steps", 0)
for _epoch in job.epochs(3):
    for x, y in job.batches(loader):
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        job.state["steps"] += 1
        print("step", job.state["steps"], flush=True)
digest.tell(model.state_dict(), optimizer.state_dict())
