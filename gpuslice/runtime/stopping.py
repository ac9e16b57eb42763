"""Whether the job can stop where its script is, and what is done at a boundary: decided here only.

`BoundaryCounter` calls the process's controller when its ``stop_at`` is reached. The controller says what it
wishes (`Wish`), and `decide` says what is done (`Act`). `Suspension.obstacle` says what stands in the way.
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
    """What keeps the job from being suspended where its script is."""

    NONE = "nothing"
    #: Its tensors are wrappers without memory.
    TRANSFORM = "a function that torch.func transforms"
    BACKWARD = "a backward pass"
    #: The ranks of an elastic job are amid a change.
    CHANGE = "a change of the job's ranks"
    CAPTURE = "the capture of a CUDA graph"
    COLLECTIVE = "a pending collective"


class Wish(Enum):
    """What a controller wishes of a boundary."""

    NOTHING = "the job trains on"
    PARK = "the job leaves its device"
    #: A signal has brought the state back without a lease.
    PARK_AGAIN = "the job has no lease, and leaves the device when the signal's handler has ended"


class Act(Enum):
    """What is done at a boundary."""

    RUN_ON = "the script goes on"
    #: Other ranks that have parked may be what the script waits for.
    PASS_BY = "the script goes on, and who waits for this rank is told"
    PARK = "the job is suspended"


def decide(wish: Wish, obstacle: Obstacle, *, in_handler: bool = False) -> Act:
    """Return what is done at a boundary.

    Parameters
    ----------
    wish
        Of the controller.
    obstacle
        To a suspend here.
    in_handler
        Whether the main thread runs the handler of the signal for which the state has come back.
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
    """Return what keeps the job from being suspended here, what is cheaper to see first."""
    if torch._C._current_graph_task_id() != -1:
        return Obstacle.BACKWARD
    if attached is not None and not attached.interruptible:
        return Obstacle.CHANGE
    try:
        device.check_idle()
    except SuspendRefusedError:
        return Obstacle.CAPTURE
    return Obstacle.COLLECTIVE if pending_collectives.pending() else Obstacle.NONE
