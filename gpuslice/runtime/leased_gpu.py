"""GPUs of leases: the first one becomes the one that the script's names mean (``launch.visible_gpus``)."""

from __future__ import annotations

import os

from gpuslice.errors import EnvironmentUnusableError, SuspendRefusedError
from gpuslice.kernels import Device, open_device
from gpuslice.kernels.cuda import runtime_calls
from gpuslice.launch.visible_gpus import VISIBLE, VisibleGpus, hides_all
from gpuslice.types import DeviceName


def show_first(leased: DeviceName, all_gpus: str, local_rank: int) -> VisibleGpus:
    """Have this process see the leased GPU where its script looks for it, if CUDA has yet to begin.

    Parameters
    ----------
    leased
        As the scheduler calls it.
    all_gpus
        What the scheduler shows its jobs; empty if it does not know.

    Returns
    -------
    VisibleGpus
        How the process numbers the scheduler's GPUs.
    """
    if leased.kind != "cuda" or not all_gpus:
        return VisibleGpus()
    shown = os.environ.get(VISIBLE)
    if runtime_calls.driver_has_begun():
        return VisibleGpus.as_begun(all_gpus, shown)
    own = all_gpus if shown is None else shown
    if hides_all(own):
        return VisibleGpus()
    gpus = VisibleGpus.for_lease(all_gpus, leased.index or 0, local_rank=local_rank, own=own)
    if gpus.variable:
        runtime_calls.show_gpus(VISIBLE, gpus.variable, hides_all)
    return gpus


def open_target(name: DeviceName | None, home: Device, cpu_slots: int) -> Device | None:
    """The device to move to, none if that is home; one that is not there is refused like a state that cannot.

    Raises
    ------
    SuspendRefusedError
        If it is not there.
    """
    if name is None or name == home.name:
        return None
    try:
        return open_device(name, cpu_slots=cpu_slots)
    except EnvironmentUnusableError as error:
        raise SuspendRefusedError(error.message, error.remedy) from error
