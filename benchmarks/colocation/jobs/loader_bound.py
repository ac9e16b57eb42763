"""A small model whose batches come from a slow source: it mostly waits."""

import time

import torch
from torch.utils.data import DataLoader, Dataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(5)


class Slow(Dataset[torch.Tensor]):
    """Vectors that each take some time to arrive, as from a disk that is far away."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.full((128,), float(index % 7))


model = torch.nn.Linear(128, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(100_000):
    for batch in DataLoader(Slow(), batch_size=8):
        optimizer.zero_grad()
        model(batch.to(device)).square().mean().backward()
        optimizer.step()
