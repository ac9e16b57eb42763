"""The controller of jobs that take turns on a device without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpuslice.agent.drill import stay_suspended
from gpuslice.launch.command import rank_path
from gpuslice.launch.step_control import StepControl
from gpuslice.runtime.boundaries import NEVER
from gpuslice.runtime.runtime import Runtime
from gpuslice.runtime.stopping import Act, Wish


class Turns:
    """A controller that suspends the job at its next boundary when another job's turn has come.

    Parameters
    ----------
    runtime
        The job.
    control
        Tells whether it is this job's turn.
    """

    def __init__(self, runtime: Runtime, control: StepControl) -> None:
        self._runtime = runtime
        self._control = control

    def start(self) -> None:
        """Check the RAM disk, and ask to be called at every boundary."""
        _ = self._runtime.storage.ramdisk
        self._runtime.boundaries.stop_at = 0

    def at_boundary(self, boundary: int) -> Sequence[int]:
        """Suspend until it is this job's turn. Return the signals held back. An error ends the job."""
        wish = Wish.PARK if self._control.away else Wish.NOTHING
        if self._runtime.suspension.at_boundary(wish) is not Act.PARK:
            return []
        return stay_suspended(self._runtime, self._control.await_turn)

    def finish(self) -> None:
        """Stop taking turns, and close the control. The other jobs go on without this one."""
        self._runtime.boundaries.stop_at = NEVER
        self._control.close()

    def end_threads(self) -> None:
        """Do nothing: there are no threads."""


def from_settings(runtime: Runtime) -> Turns | None:
    """Return the job's turns if its profiler has prepared them, else None."""
    if not runtime.settings.profile:
        return None
    control = StepControl.of_turns(rank_path(Path(runtime.settings.profile), runtime.identity.rank))
    return None if control is None else Turns(runtime, control)
