"""Two ranks that are parked for longer than their group's timeout, and come back one after the other.

Words: a directory, where the rank that is back first says by a file that it has waited longer than that, too;
and the backend, ``gloo`` or ``nccl``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

import gpuslice

TIMEOUT = timedelta(seconds=1)
LONGER_S = 2 * TIMEOUT.total_seconds()
SETUP = timedelta(seconds=300)


def train(rank: int, directory: str, kind: str) -> None:
    """Be one of the two ranks."""
    meeting = f"file://{directory}/rendezvous"
    dist.init_process_group(kind, init_method=meeting, rank=rank, world_size=2, timeout=SETUP)
    device = torch.device("cuda", rank) if kind == "nccl" else torch.device("cpu")
    if kind == "nccl":
        torch.cuda.set_device(rank)
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
    weights = torch.ones(1000, device=device)
    job = gpuslice.attach(weights=weights)
    dist.barrier()
    backend._set_default_timeout(TIMEOUT)
    job.suspend()
    threading.Event().wait(LONGER_S)
    come_back_late(rank, Path(directory, "waited"), job.resume)
    dist.all_reduce(weights)
    assert weights.eq(2.0).all()
    if kind == "gloo":
        assert backend.options._timeout > TIMEOUT
        gpuslice.boundary()
    assert backend.options._timeout == TIMEOUT
    backend._set_default_timeout(SETUP)
    dist.barrier()
    dist.destroy_process_group()


def come_back_late(rank: int, waited: Path, resume: Callable[[], object]) -> None:
    """The second rank waits until the first one has waited for it longer than its timeout."""
    if rank == 0:
        threading.Timer(LONGER_S, waited.touch).start()
    else:
        while not waited.exists():
            threading.Event().wait(0.01)
    resume()


if __name__ == "__main__":
    torch.set_num_threads(1)
    start_processes(train, tuple(sys.argv[1:]), 2, start_method="fork")
