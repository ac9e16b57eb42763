"""A gang that trains one model of each kind in one loop; every rank writes the digest of each.

Words: a directory for the digests, how many ranks (it forks them unless ``RANK`` says which one it is),
epochs, and the rank and step at which a rank kills itself, 0 for never. If the rank is ``all``, all
leave there: they suspend and end. With GANG_SLOW_UNTIL steps take longer, and who is to die or leave waits,
until there is such a file; and ranks die at moments that are ordered in the directory (deadly_moments.py).
GANG_KINDS are the kinds, if not all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what an optimizer would import in every rank
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import gpuslice

#: Every rank is late by up to so much, each time by another time.
MOST_DELAY_S = 0.02
TIMEOUT_S = float(os.environ.get("GANG_TIMEOUT_S", "120"))
SLOW_UNTIL = os.environ.get("GANG_SLOW_UNTIL", "")
SLOW_S = 0.15
KINDS = os.environ.get("GANG_KINDS", "").split()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = layers()
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def models(ranks: int) -> dict[str, nn.Module]:
    mesh = init_device_mesh("cpu", (ranks,))
    made: dict[str, Callable[[], nn.Module]] = {
        "ddp": lambda: DistributedDataParallel(layers()),
        "ddp_views": lambda: DistributedDataParallel(layers(), gradient_as_bucket_view=True),
        "accumulating": lambda: DistributedDataParallel(layers()),
        "fsdp": lambda: sharded(mesh),
        "tensor_parallel": lambda: tensor_parallel(mesh),
        "plain": layers,
    }
    return {kind: made[kind]() for kind in KINDS or made}


def train_step(kind: str, model: nn.Module, batch: torch.Tensor, number: int) -> bool:
    """A pass of one kind; whether a step of its optimizer follows."""
    last = kind != "accumulating" or number % 2 == 1
    if kind == "tensor_parallel":  # all of its ranks see the same data
        dist.broadcast(batch, 0)
    waiting = contextlib.nullcontext() if last else model.no_sync()  # type: ignore[operator]
    with waiting:
        model(batch).square().mean().backward()
    if kind == "plain":
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
    return last


def uneven(rank: int) -> nn.Module:
    """Ranks with different numbers of batches, one of them slower than the others."""
    model = DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    with Join([model]):
        for batch in DataLoader(torch.randn(8 + 4 * rank, 8), batch_size=2):
            if rank == 1:
                sum(range(100_000))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    return model


def evaluated(rank: int, model: nn.Module) -> torch.Tensor:
    """One rank evaluates for long, and the others wait for its verdict."""
    verdict = torch.zeros(())
    if rank == 0:
        model.eval()
        with torch.no_grad():
            for batch in torch.ones(60, 2, 8).unbind():
                verdict += model(batch).sum()
    dist.broadcast(verdict, 0)
    return verdict


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, DTensor):
        yield value.to_local()
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def digest(*values: Any) -> str:
    found = hashlib.sha256()
    for value in values:
        for tensor in tensors(value):
            found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(rank: int, directory: str, ranks: int, epochs: int, deadly_rank: str, deadly_step: int) -> None:
    meeting = f"file://{directory}/rendezvous.{os.getppid()}.{ranks}"  # another one for another attempt
    environ = {"rank": rank, "world_size": ranks, "init_method": meeting}
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", timeout=limit, **({} if "RANK" in os.environ else environ))  # type: ignore[arg-type]
    if SLOW_UNTIL:
        import deadly_moments

        deadly_moments.arm(Path(directory), rank)
    trained = models(ranks)
    optimizers = {kind: torch.optim.Adam(model.parameters(), lr=0.01) for kind, model in trained.items()}
    rows = torch.randn(28 * ranks, 8, generator=torch.Generator().manual_seed(7))
    sampler: DistributedSampler[Any] = DistributedSampler(rows)  # type: ignore[arg-type]
    loader = DataLoader(rows, batch_size=4, sampler=sampler)  # type: ignore[arg-type, var-annotated]
    named = {f"{kind}_optimizer": optimizer for kind, optimizer in optimizers.items()}
    Path(directory, f"pid.{ranks}.{rank}").write_text(str(os.getpid()))
    job = gpuslice.attach(**trained, **named, batches=0)
    Path(directory, f"began.{ranks}.{rank}").write_text(str(job.state["batches"]))
    done = 0
    for epoch in job.epochs(epochs):
        sampler.set_epoch(epoch)
        for batch in job.batches(loader):
            number = job.state["batches"]  # a restarted loop begins in the midst of an epoch
            time.sleep(random.Random(f"{rank} {number}").random() * MOST_DELAY_S)
            for kind, model in trained.items():
                if train_step(kind, model, batch, number):
                    optimizers[kind].step()
                    optimizers[kind].zero_grad()
            job.state["batches"] = number + 1
            done += 1
            slow = bool(SLOW_UNTIL) and not os.path.exists(SLOW_UNTIL)
            if done == deadly_step and deadly_rank in ("all", str(rank)):
                while slow and not os.path.exists(SLOW_UNTIL):
                    time.sleep(0.01)
                if deadly_rank == "all":
                    job.suspend()
                    sys.exit()
                Path(directory, f"killed.{ranks}.{rank}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(SLOW_S if slow else 0.0)
    found = {kind: digest(dict(model.named_parameters())) for kind, model in trained.items()}
    found |= {
        kind: digest({str(n): s for n, s in enumerate(optimizer.state.values())})
        for kind, optimizer in named.items()
    }
    found["uneven"] = digest(dict(uneven(rank).named_parameters()))
    found["evaluated"] = digest({"": evaluated(rank, trained["plain"])})
    found["done"] = str(done)
    Path(directory, f"digests.{ranks}.{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, *numbers = sys.argv[1:]
    worlds, epoch_count, deadly, step = numbers
    for world in map(int, worlds.split("+")):
        words = where, world, int(epoch_count), deadly, int(step)
        if "RANK" in os.environ:
            train(int(os.environ["RANK"]), *words)
        else:
            start_processes(train, words, world, start_method="fork")
