"""A loop of one's own over accelerate, in bfloat16: persistent workers, clipped and accumulated gradients."""

from __future__ import annotations

import digest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

set_seed(3)
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, mixed_precision="bf16")
model: nn.Module = nn.Sequential(nn.Linear(50, 300), nn.ReLU(), nn.Dropout(0.2), nn.Linear(300, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=200)
rows = torch.utils.data.TensorDataset(torch.randn(640, 50), torch.randint(0, 10, (640,)))
loader = torch.utils.data.DataLoader(
    rows, batch_size=16, shuffle=True, num_workers=2, persistent_workers=True
)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for _ in range(3):
    for inputs, classes in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), classes))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
digest.tell(model.state_dict(), optimizer.state_dict())
