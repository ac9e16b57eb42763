"""A multilayer perceptron on random vectors: matrix products of a few megabytes."""

import torch
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1)
data = TensorDataset(torch.randn(4096, 256), torch.randint(10, (4096,)))
model = torch.nn.Sequential(
    torch.nn.Linear(256, 512),
    torch.nn.ReLU(),
    torch.nn.Linear(512, 512),
    torch.nn.ReLU(),
    torch.nn.Linear(512, 10),
).to(device)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(100_000):
    for inputs, labels in DataLoader(data, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
        optimizer.step()
