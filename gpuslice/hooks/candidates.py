"""Prepares processes that may become ranks. A process becomes a rank when it joins a process group.

torchrun tells its workers in the environment which rank they are. Other launchers do not: Lightning starts
the ranks after the first from within the first, ``torch.multiprocessing.spawn`` calls a function in each.
So every Python below ``gpuslice run`` that imports torch is prepared here. It becomes a rank when its script
calls ``init_process_group``, which knows the rank, or trains. A process that does neither counts boundaries
without a use.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpuslice.files import occupy_closed_streams
from gpuslice.hooks import process_groups
from gpuslice.hooks.hooks import count_boundaries
from gpuslice.hooks.single_rank_groups import watch_for_training
from gpuslice.runtime import foreign_processes
from gpuslice.runtime.boundaries import counter


def prepare() -> None:
    """Install the hooks by which this process can become a rank later.

    This takes milliseconds only, because most processes never become a rank.
    """
    occupy_closed_streams()
    count_boundaries(counter)
    foreign_processes.announce_on_cuda()
    process_groups.watch(_join)
    # Without a scheduler nobody says whether the parent trains, and a named job has one place for snapshots.
    if os.environ.get("GPUSLICE_SOCKET") or not os.environ.get("GPUSLICE_JOB"):
        watch_for_training(counter, _take_over)


def _join(rank: int, world_size: int) -> None:
    if world_size == 1:
        watch_for_training(counter, _take_over)
    elif not process_groups.below_a_rank(os.environ):
        from gpuslice.hooks import installation  # late: it costs a second, and few processes join anything

        installation.join(rank, world_size)


def _take_over(boundary: int) -> Sequence[int]:
    from gpuslice.hooks import installation  # late, as above

    return installation.take_over(boundary)
