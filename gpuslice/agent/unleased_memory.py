"""A check for memory that a job holds on GPUs of which it has no lease. The jobs there lack it."""

from __future__ import annotations

from collections.abc import Callable

from gpuslice.config import format_size
from gpuslice.kernels.cuda import allocator_memory
from gpuslice.launch.visible_gpus import VisibleGpus
from gpuslice.runtime.ending import say
from gpuslice.types import DeviceName

_REMEDY = "its GPU is cuda, or cuda:{LOCAL_RANK} in a gang; docs/submit.md, Which GPU a script means"


class UnleasedMemory:
    """A check of what torch holds on the GPUs that are not leased.

    Parameters
    ----------
    tell
        Writes the warning to stderr. Called once at most.
    """

    def __init__(self, tell: Callable[..., None] = say) -> None:
        self._tell = tell
        self._told = False

    def look(self, leased: DeviceName, gpus: VisibleGpus, runs: Callable[[], bool]) -> str:
        """Return what the script holds without a lease, such as ``4.00 MiB on cuda:1``; else an empty text.

        Parameters
        ----------
        leased
            The leased device, by the process's own name.
        gpus
            The process's numbers of the scheduler's GPUs.
        runs
            Returns True while the job runs. While it parks and resumes, its memory is being moved.
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
