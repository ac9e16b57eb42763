"""The only member of a process group: it becomes the job's rank once it trains, in place of its parent.

A launcher that is told of one GPU makes a group of one. Libraries that do not train make such groups, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from gpuslice.hooks import process_groups
from gpuslice.runtime.boundaries import BoundaryCounter


def watch_for_training(boundaries: BoundaryCounter, take_over: Callable[[int], Sequence[int]]) -> None:
    """This process is alone in its group: call ``take_over`` at the first boundary that it trains at."""
    if process_groups.below_a_launcher(os.environ):
        boundaries.controller, boundaries.stop_at = _SingleRankController(boundaries, take_over), 1


class _SingleRankController:
    """Controls the only member of a process group until it trains."""

    def __init__(self, boundaries: BoundaryCounter, take_over: Callable[[int], Sequence[int]]) -> None:
        self._boundaries = boundaries
        self._take_over = take_over

    def at_boundary(self, boundary: int) -> Sequence[int]:
        """Take the parent's rank over, if this process has made a step or ends a backward pass here."""
        boundaries = self._boundaries
        if not (boundaries.steps or (boundaries.amid_graphs and not boundaries.counts_module_calls)):
            return ()
        boundaries.forget_controller()
        return self._take_over(boundary)
