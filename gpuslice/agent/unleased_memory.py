"""Notices that a job holds memory of GPUs of which it has no lease: whoever has them lacks it."""

from __future__ import annotations

from collections.abc import Callable

from gpuslice.config import format_size
from gpuslice.kernels.cuda import allocator_memory
from gpuslice.launch.visible_gpus import VisibleGpus
from gpuslice.runtime.ending import say
from gpuslice.types import DeviceName

_REMEDY = "its GPU is cuda, or cuda:{LOCAL_RANK} in a gang; docs/submit.md, Which GPU a script means"


class UnleasedMemory:
    """Looks at what torch holds on the GPUs.

    Parameters
    ----------
    tell
        Gets what is to be said on stderr, once.
    """

    def __init__(self, tell: Callable[..., None] = say) -> None:
        self._tell = tell
        self._told = False

    def look(self, leased: DeviceName, gpus: VisibleGpus, runs: Callable[[], bool]) -> str:
        """What is where it should not be, ``4.00 MiB on cuda:1``; or nothing.

        Parameters
        ----------
        leased
            As the process calls it.
        gpus
            How the process numbers the scheduler's GPUs.
        runs
            Whether the job runs: while it parks and comes back, its memory is on its way.
        """
        if leased.kind != "cuda" or not runs():
            return ""
        held = allocator_memory.held_elsewhere(leased.index or 0)
        if not held or not runs():
            return ""
        found = ", ".join(
            f"{format_size(nbytes)} on {gpus.outside(DeviceName('cuda', gpu))}"
            for gpu, nbytes in held.items()
        )
        if not self._told:
            self._told = True
            has = f"its lease is of {gpus.outside(leased)}"
            self._tell(f"the script holds {found}, and {has}: it cannot be suspended", _REMEDY)
        return found
