"""Decides whether the job can stop where its script is, and what is done at a boundary. No other module does.

`BoundaryCounter` calls the process's controller when its ``stop_at`` is reached. The controller says what it
wishes (`Wish`), `Suspension.obstacle` says what stands in the way, and `decide` says what is done (`Act`).
"""

from __future__ import annotations

from enum import Enum

import torch
from torch._C._functorch import peek_interpreter_stack

from gpuslice.checkpoint.discover import pending_collectives
from gpuslice.errors import SuspendRefusedError
from gpuslice.kernels import Device
from gpuslice.training.attached import Attached


class Obstacle(Enum):
    """A reason why the job cannot be suspended at the present place of its script."""

    NONE = "nothing"
    #: In a transform, tensors are wrappers without memory.
    TRANSFORM = "a function that torch.func transforms"
    BACKWARD = "a backward pass"
    #: The ranks of an elastic job are amid a change.
    CHANGE = "a change of the job's ranks"
    CAPTURE = "the capture of a CUDA graph"
    COLLECTIVE = "a pending collective"


class Wish(Enum):
    """The controller's wish for a boundary."""

    NOTHING = "the job trains on"
    PARK = "the job leaves its device"
    #: A signal has brought the state back without a lease.
    PARK_AGAIN = "the job has no lease, and leaves the device when the signal's handler has ended"


class Act(Enum):
    """What is done at a boundary: run on, pass by, or park."""

    RUN_ON = "the script goes on"
    #: The script cannot stop here: it may be waiting for other ranks, which have parked.
    PASS_BY = "the script goes on, and who waits for this rank is told"
    PARK = "the job is suspended"


def decide(wish: Wish, obstacle: Obstacle, *, in_handler: bool = False) -> Act:
    """Return what is done at a boundary, given the controller's wish and what stands in the way.

    Parameters
    ----------
    wish
        The controller's wish.
    obstacle
        What keeps the job from being suspended here.
    in_handler
        True if the main thread runs the handler of the signal for which the state was brought back.
    """
    if wish is Wish.NOTHING:
        return Act.RUN_ON
    if obstacle is not Obstacle.NONE:
        return Act.PASS_BY
    return Act.RUN_ON if wish is Wish.PARK_AGAIN and in_handler else Act.PARK


def is_transformed() -> bool:
    """Return True if the caller is in a function that torch.func transforms."""
    return peek_interpreter_stack() is not None


def find_obstacle(device: Device, attached: Attached | None) -> Obstacle:
    """Return what keeps the job from being suspended here. Cheaper checks come first."""
    if torch._C._current_graph_task_id() != -1:
        return Obstacle.BACKWARD
    if attached is not None and not attached.interruptible:
        return Obstacle.CHANGE
    try:
        device.check_idle()
    except SuspendRefusedError:
        return Obstacle.CAPTURE
    return Obstacle.COLLECTIVE if pending_collectives.pending() else Obstacle.NONE
