"""Train a convolutional network to read handwritten digits of 8 x 8 pixels."""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def load() -> TensorDataset:
    """Return the images, 1 x 8 x 8 with values in 0..1, and their labels."""
    with Path(__file__).with_name("digits.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    pixels = torch.tensor([[int(grey, 17) for grey in row["pixels"]] for row in rows])
    labels = torch.tensor([int(row["label"]) for row in rows])
    return TensorDataset(pixels.view(-1, 1, 8, 8) / 16.0, labels)


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return right


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(8)
    torch.use_deterministic_algorithms(True)
    data = load()
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = build().to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    images, labels = (tensor.to(options.device) for tensor in data.tensors)
    step = 0
    while step < options.steps:
        for batch, answers in loader:
            loss = nn.functional.cross_entropy(model(batch.to(options.device)), answers.to(options.device))
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            step += 1
            if step % 100 == 0:
                right = accuracy(model, images, labels)
                print(f"step {step} loss {loss.item():.6f} accuracy {right:.3f}", flush=True)
            if step == options.steps:
                break
    state = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], state)
    print("digest", hashlib.sha256(state.getvalue()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
