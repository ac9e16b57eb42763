"""A training that names its state: attached.py EPOCHS [FILE] prints the digest of the finished model.

After 100 steps and before FILE exists, each step is slower than the last one, so that the training does not
end while a test still needs it. How many steps this process made goes to stderr.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import torch

import gpuslice

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
inputs = torch.randn(512, 16)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
job = gpuslice.attach(model=model, optimizer=optimizer, loader=loader)
made = 0
for _ in job.epochs(int(sys.argv[1])):
    for x, y in job.batches(loader):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        made += 1
        if made > 100 and not all(Path(word).exists() for word in sys.argv[2:]):
            time.sleep(0.1 * 2 ** (made / 100))
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print("made", made, file=sys.stderr)
print("digest", digest.hexdigest())
