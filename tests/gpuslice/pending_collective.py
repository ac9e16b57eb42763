"""Two ranks; one reaches a boundary with a collective that the other starts only after a boundary of its own.

Suspends are asked for at boundary 2.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

import gpuslice

COUNT = 1 << 20


def train() -> None:
    """Be one of the two ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    summed = torch.full((COUNT,), float(rank + 1))
    gpuslice.boundary()
    if rank == 0:
        work = dist.all_reduce(summed, async_op=True)
        gpuslice.boundary()
        assert not work.is_completed()
        store.set("passed", "")
        work.wait()
    else:
        store.wait(["passed"])
        gpuslice.boundary()
        dist.all_reduce(summed)
    assert summed.eq(3.0).all()
    gpuslice.boundary()
    assert summed.eq(3.0).all()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
