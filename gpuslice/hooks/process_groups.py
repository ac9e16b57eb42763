"""Notices when this process joins a process group, and knows whether a rank or a launcher started it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch.distributed

from gpuslice.checkpoint.discover import pending_collectives
from gpuslice.launch.rank_identity import ARMED


def watch(join: Callable[[int, int], None]) -> None:
    """Have ``join(rank, world_size)`` called whenever this process has joined a default process group.

    All ways to join set the default group in one function of torch's, which is replaced here. Pending
    collectives of all groups are tracked from now on: they keep the process from being suspended.
    """
    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d

    pending_collectives.track()
    note = distributed_c10d._update_default_pg

    def _update_default_pg(pg: torch.distributed.ProcessGroup | None) -> None:
        note(pg)
        if isinstance(pg, torch.distributed.ProcessGroup):
            join(pg.rank(), pg.size())

    distributed_c10d._update_default_pg = _update_default_pg


def below_a_rank(environ: Mapping[str, str]) -> bool:
    """Return True if a rank has started this process. A group that it joins is then not the job's."""
    rank, _, pid = environ.get(ARMED, "").partition(" ")
    return rank != "" and pid != str(os.getpid())


def below_a_launcher(environ: Mapping[str, str]) -> int:
    """Return the PID of the launcher that started this process; 0 if there is none.

    A launcher has the hooks, but is no rank of a group.
    """
    rank, _, pid = environ.get(ARMED, "").partition(" ")
    return int(pid) if rank == "" and pid not in ("", str(os.getpid())) else 0
