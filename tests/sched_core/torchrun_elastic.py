"""A script as one writes it for torchrun's elastic launch: it saves and loads its own checkpoint.

    torchrun_elastic.py DIRECTORY WIDTHS [MAY_END]

knows nothing of gpuslice. Told to end, by SIGTERM, it saves and ends between two batches, but not before
there is a file ``MAY_END``. It goes on until it has had the numbers of ranks ``WIDTHS`` (``1-2-1``), and an
epoch is over; each rank writes down what it saw.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

LENGTH, FEATURES, BATCH = 48, 8, 12
EPOCHS = int(os.environ.get("EPOCHS", "200"))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.rand(LENGTH, FEATURES, generator=generator)
    return TensorDataset(torch.arange(LENGTH), inputs, inputs @ torch.linspace(-1, 1, FEATURES))


def left_for(rank: int, width: int, epoch: int, position: int) -> list[list[int]]:
    """The parts of ``rank`` of the global batches that an epoch still has."""
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(epoch)).tolist()
    part = BATCH // width
    starts = range(position, LENGTH, BATCH)
    return [order[start + rank * part : start + (rank + 1) * part] for start in starts]


def main() -> None:
    directory, wanted = Path(sys.argv[1]), sys.argv[2]
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    dist.init_process_group("gloo")
    rank, width = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inner = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(inner.parameters(), 0.1, momentum=0.9)
    state: dict[str, Any] = {"epoch": 0, "position": 0, "widths": []}
    if (directory / "checkpoint.pt").exists():
        state = torch.load(directory / "checkpoint.pt")
        inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    if state["widths"][-1:] != [width]:
        state["widths"].append(width)
    model = DistributedDataParallel(inner)
    dataset = data()
    with (directory / f"log.{rank}").open("a") as log:
        while state["epoch"] < EPOCHS and not wanted_is_over(wanted, state):
            batches = left_for(rank, width, state["epoch"], state["position"])
            for indices, inputs, targets in DataLoader(dataset, batch_sampler=batches):
                if told:
                    break
                time.sleep(0.05 if wanted else 0.0)
                loss = torch.nn.functional.mse_loss(model(inputs).squeeze(1), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state["position"] += BATCH
                line = {"epoch": state["epoch"], "width": width, "seen": indices.tolist()}
                print(json.dumps(line | {"weight": inner.weight.tolist()}), file=log, flush=True)
            if told:
                break
            state["epoch"], state["position"] = state["epoch"] + 1, 0
    while told and not all(map(os.path.exists, sys.argv[3:])):
        time.sleep(0.01)
    if rank == 0:
        torch.save(
            {**state, "model": inner.state_dict(), "optimizer": optimizer.state_dict()}, directory / "new.pt"
        )
        os.replace(directory / "new.pt", directory / "checkpoint.pt")
    dist.barrier()
    del model  # see attached_ddp.py
    gc.collect()
    dist.destroy_process_group()


def wanted_is_over(wanted: str, state: dict[str, Any]) -> bool:
    """Whether it has had the widths that it waits for."""
    return bool(wanted) and state["position"] == 0 and wanted in "-".join(map(str, state["widths"]))


if __name__ == "__main__":
    main()
