"""Two ranks of which the first has a collective pending at every odd boundary, until a file exists.

The second comes to it only after its own odd boundary, so it must not be left parked there. Word: the file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import gpuslice

dist.init_process_group("gloo")
store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
go_on = torch.ones(1)
rounds = 0
while go_on.item():
    rounds += 1
    if rank == 0:
        go_on.fill_(float(not Path(sys.argv[1]).exists()))
        work = dist.all_reduce(go_on, async_op=True)
        gpuslice.boundary()
        store.set(f"round {rounds}", "")
        work.wait()
    else:
        go_on.zero_()
        store.wait([f"round {rounds}"])
        gpuslice.boundary()
        dist.all_reduce(go_on)
    gpuslice.boundary()
dist.destroy_process_group()
