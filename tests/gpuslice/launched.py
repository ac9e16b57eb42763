"""A training of two ranks (or one, alone) told apart by what they are given, with launchers of its own.

Words: the launcher, a directory for the digests, how many epochs, and perhaps a file: after 100 steps it goes
slowly until that is there, so that it would take minutes.
"""

from __future__ import annotations

import gc
import hashlib
import os
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import DataLoader

RANKS = 2


def train(rank: int, directory: str, epochs: int) -> None:
    ranks = 1 if sys.argv[1] == "alone" else RANKS
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(20, 64))
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(rank)
    data = torch.randn(48, 20)
    made = 0
    for _ in range(epochs):
        for x in DataLoader(data, batch_size=8):  # type: ignore[arg-type, var-annotated]
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            made += 1
            if made > 100 and not all(map(os.path.exists, sys.argv[4:])):
                time.sleep(1.0)
    with open(os.path.join(directory, f"digest.{rank}"), "w") as file:
        file.write(hashlib.sha256(model.module.weight.detach().numpy().tobytes()).hexdigest())
    # First, or the reducer may be the last to hold the group: torch then joins gloo's threads with the GIL
    # held, for which one of them may wait. Not later, either: as Python is finalized that aborts.
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


#: Bound to the port at which the ranks meet, so that nobody else is given it before.
kept = socket.socket()


def free_port() -> str:
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    return str(kept.getsockname()[1])


def multiprocessing(how: str, directory: str, epochs: int) -> None:
    """As a script does whose launcher is torch.multiprocessing."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    if how == "alone":
        start_processes(train, (directory, epochs), 1, start_method="spawn")
    else:
        start_processes(train, (directory, epochs), RANKS, start_method=how)


def lightning(directory: str, epochs: int) -> None:
    """The first rank starts the others: the same command line, another LOCAL_RANK."""
    if "LOCAL_RANK" not in os.environ:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), NODE_RANK="0", LOCAL_RANK="0")
        os.environ["WORLD_SIZE"] = str(RANKS)
        others = [
            subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {"LOCAL_RANK": str(rank)})
            for rank in range(1, RANKS)
        ]
    else:
        others = []
    train(int(os.environ["LOCAL_RANK"]), directory, epochs)
    sys.exit(max([other.wait() for other in others], default=0))


if __name__ == "__main__":
    torch.set_num_threads(1)
    launcher, where, count = sys.argv[1:4]
    if launcher == "lightning":
        lightning(where, int(count))
    multiprocessing(launcher, where, int(count))
