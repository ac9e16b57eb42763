"""A training with Ray Train: trainer.py DIRECTORY EPOCHS WORKERS [RANK STEP [FILE]].

Each worker writes the digest of the finished model into DIRECTORY. Worker RANK kills itself at that step,
unless there is the file ``survived`` in DIRECTORY. After 20 steps and before FILE exists, each step
is slower than the last one, so that the training does not end while a test still needs it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model

import gpuslice


def train(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank, directory = context.get_world_rank(), Path(config["directory"])
    torch.manual_seed(1)
    model = prepare_model(
        torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(256, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
    job = gpuslice.attach(model=model, optimizer=optimizer, loader=loader)
    made = 0
    for epoch in job.epochs(config["epochs"]):
        for x, y in job.batches(loader):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            made += 1
            if (rank, made) == config["dies"] and not (directory / "survived").exists():
                (directory / "survived").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if made > 20 and config["enough"] and not os.path.exists(config["enough"]):
                time.sleep(0.1 * 2 ** (made / 20))
        ray.train.report({"loss": loss.item(), "epoch": epoch})
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    found = {"digest": digest.hexdigest(), "made": made, "ranks": context.get_world_size()}
    (directory / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    directory, epochs, workers, *dies = sys.argv[1:]
    result = TorchTrainer(
        train,
        train_loop_config={
            "directory": directory,
            "epochs": int(epochs),
            "dies": tuple(map(int, dies[:2])),
            "enough": (dies[2:] or [""])[0],
        },
        scaling_config=ScalingConfig(num_workers=int(workers)),
    ).fit()
    print("last", result.metrics)
