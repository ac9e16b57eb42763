"""Notices that this process joins a process group, by whatever way."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch.distributed

from gpuslice.checkpoint.discover import pending_collectives
from gpuslice.launch.rank_identity import ARMED


def watch(join: Callable[[int, int], None]) -> None:
    """Have ``join(rank, world_size)`` called when this process has joined a default process group.

    By every way there is: ``init_process_group`` notes the group in one function, and nobody else does.
    What is pending in any group keeps the process from being suspended.
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
    """Whether a process that started this one is a rank: a group that this one joins is another one then."""
    rank, _, pid = environ.get(ARMED, "").partition(" ")
    return rank != "" and pid != str(os.getpid())


def below_a_launcher(environ: Mapping[str, str]) -> int:
    """The process that started this one and has the hooks, but is no rank of a group; 0 if there is none."""
    rank, _, pid = environ.get(ARMED, "").partition(" ")
    return int(pid) if rank == "" and pid not in ("", str(os.getpid())) else 0
