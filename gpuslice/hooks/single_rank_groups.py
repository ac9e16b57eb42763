"""Makes a child of the job's first process the rank once the child trains, alone or in a group of one rank.

A launcher that is told of one GPU makes a group of one rank. A driver that imports torch starts one training
after another. Neither trains itself. Children of a rank that has joined a group are not concerned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from torch.utils.data import get_worker_info

from gpuslice.hooks import process_groups
from gpuslice.runtime.boundaries import BoundaryCounter


def watch_for_training(boundaries: BoundaryCounter, take_over: Callable[[int], Sequence[int]]) -> None:
    """Have ``take_over`` called at the first boundary at which this process trains.

    Nothing is changed unless a process that has the hooks and is no rank of a group has started this one.
    """
    if process_groups.below_a_launcher(os.environ):
        boundaries.controller, boundaries.stop_at = _SingleRankController(boundaries, take_over), 1


class _SingleRankController:
    """The controller of a process that becomes the job's rank once it trains."""

    def __init__(self, boundaries: BoundaryCounter, take_over: Callable[[int], Sequence[int]]) -> None:
        self._boundaries = boundaries
        self._take_over = take_over

    def at_boundary(self, boundary: int) -> Sequence[int]:
        """Call ``take_over`` if this process trains here, and return its signals to deliver.

        It trains if it has made an optimizer step, or ends a backward pass here.
        """
        if not self._boundaries.trained or get_worker_info() is not None:  # a worker's data set may
            return ()
        self._boundaries.forget_controller()
        return self._take_over(boundary)
