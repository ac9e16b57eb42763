"""Train a perceptron with Adam to tell the cultivar of a wine from 13 measurements."""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def load() -> TensorDataset:
    """Return the standardized measurements and the cultivars, 0..2."""
    with Path(__file__).with_name("wine.csv").open(newline="") as file:
        rows = [[float(cell) for cell in row] for row in list(csv.reader(file))[1:]]
    table = torch.tensor(rows)
    measured = table[:, 1:]
    return TensorDataset((measured - measured.mean(0)) / measured.std(0), table[:, 0].long())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(13)
    torch.use_deterministic_algorithms(True)
    loader = DataLoader(load(), batch_size=16, shuffle=True)
    model = nn.Sequential(
        nn.Linear(13, options.width),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(options.width, options.width),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(options.width, 3),
    ).to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.4 / options.width, weight_decay=1e-4)
    step, smoothed = 0, 0.0
    while step < options.steps:
        for measured, cultivar in loader:
            loss = nn.functional.cross_entropy(
                model(measured.to(options.device)), cultivar.to(options.device)
            )
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            step += 1
            smoothed += 0.05 * (loss.item() - smoothed)
            if step % 20 == 0:
                print(f"step {step} loss {smoothed:.6f}", flush=True)
            if step == options.steps:
                break
    state = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], state)
    print("digest", hashlib.sha256(state.getvalue()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
