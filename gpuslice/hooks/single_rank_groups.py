"""A child of the job's rank, or the only member of a process group: it becomes the rank once it trains.

A launcher that is told of one GPU makes a group of one, and a driver that imports torch starts one training
after another. Neither trains itself. Other children of a rank do not train, groups of one or not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from torch.utils.data import get_worker_info

from gpuslice.hooks import process_groups
from gpuslice.runtime.boundaries import BoundaryCounter


def watch_for_training(boundaries: BoundaryCounter, take_over: Callable[[int], Sequence[int]]) -> None:
    """Call ``take_over`` at the first boundary at which this process trains, if its parent has the hooks."""
    if process_groups.below_a_launcher(os.environ):
        boundaries.controller, boundaries.stop_at = _SingleRankController(boundaries, take_over), 1


class _SingleRankController:
    """Controls the only member of a process group until it trains."""

    def __init__(self, boundaries: BoundaryCounter, take_over: Callable[[int], Sequence[int]]) -> None:
        self._boundaries = boundaries
        self._take_over = take_over

    def at_boundary(self, boundary: int) -> Sequence[int]:
        """Take the parent's rank over, if this process has made a step or ends a backward pass here."""
        if not self._boundaries.trained or get_worker_info() is not None:  # a worker's data set may
            return ()
        self._boundaries.forget_controller()
        return self._take_over(boundary)
