"""Processes that become ranks: whoever joins a process group of several is one, whoever started it.

torchrun tells its workers in the environment which rank they are. Other launchers do not: Lightning starts
the ranks after the first from within the first, ``torch.multiprocessing.spawn`` calls a function in each.
So every Python below ``gpuslice run`` that imports torch stands ready until its script calls
``init_process_group``, which knows. A process that never does counts boundaries that nobody asks for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch.distributed

from gpuslice.hooks.hooks import count_boundaries
from gpuslice.launch.rank_identity import ARMED
from gpuslice.runtime import foreign_processes
from gpuslice.runtime.boundaries import counter


def stand_ready() -> None:
    """Do what a process needs that may become a rank; it costs milliseconds, and most of them never do."""
    count_boundaries(counter)
    foreign_processes.announce_on_cuda()
    watch(_join)


def watch(join: Callable[[int, int], None]) -> None:
    """Have ``join(rank, world_size)`` called when this process has joined a default process group of several.

    By every way there is: ``init_process_group`` notes the group in one function, and nobody else does.
    """
    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d

    note = distributed_c10d._update_default_pg

    def _update_default_pg(pg: torch.distributed.ProcessGroup | None) -> None:
        note(pg)
        if isinstance(pg, torch.distributed.ProcessGroup) and pg.size() > 1:
            join(pg.rank(), pg.size())

    distributed_c10d._update_default_pg = _update_default_pg


def below_a_rank(environ: Mapping[str, str]) -> bool:
    """Whether a process that started this one is a rank: a group that this one joins is another one then."""
    rank, _, pid = environ.get(ARMED, "").partition(" ")
    return rank != "" and pid != str(os.getpid())


def _join(rank: int, world_size: int) -> None:
    if not below_a_rank(os.environ):
        from gpuslice.hooks import installation  # late: it costs a second, and few processes join anything

        installation.join(rank, world_size)
