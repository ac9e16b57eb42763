"""The drill: suspend a job and resume it at once, at every Nth boundary or at listed ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from gpuslice import config
from gpuslice.agent.boundary_watchdog import BoundaryWatchdog
from gpuslice.errors import ConfigError, GpusliceError
from gpuslice.runtime.boundaries import NEVER
from gpuslice.runtime.ending import end, undisturbed, whole_or_ended
from gpuslice.runtime.runtime import Runtime
from gpuslice.runtime.stopping import Act, Wish
from gpuslice.runtime.threads.main_thread import MainThreadStuckError


class Drill:
    """A controller that suspends the job and resumes it on the spot.

    Parameters
    ----------
    runtime
        The job.
    every
        Suspend at boundaries ``every``, ``2 * every``, ...; 0 to use ``at``.
    at
        Boundaries to suspend at.
    """

    def __init__(self, runtime: Runtime, *, every: int = 0, at: frozenset[int] = frozenset()) -> None:
        if every and at:
            raise ConfigError("suspend_every and suspend_at are both set", "choose one of the two")
        self._runtime = runtime
        self._every = every
        self._at = sorted(at)
        self._watch = BoundaryWatchdog(runtime.boundaries)

    def start(self) -> None:
        """Check the RAM disk, choose the first boundary to stop at, and start the watchdog."""
        _ = self._runtime.storage.ramdisk
        self._ask(self._runtime.boundaries.count)
        self._watch.start()

    def at_boundary(self, boundary: int) -> Sequence[int]:
        """Suspend and resume the job. Return the signals held back. An error ends the job."""
        if self._runtime.suspension.at_boundary(Wish.PARK) is not Act.PARK:
            return []
        late = stay_suspended(self._runtime)
        self._ask(boundary)
        return late

    def finish(self) -> None:
        """Do nothing: a drill leaves nothing to finish."""

    def end_threads(self) -> None:
        """End the watchdog's thread."""
        self._watch.stop()

    def _ask(self, after: int) -> None:
        if self._every:
            self._runtime.boundaries.stop_at = (after // self._every + 1) * self._every
        else:
            position = bisect_right(self._at, after)
            self._runtime.boundaries.stop_at = self._at[position] if position < len(self._at) else NEVER


def stay_suspended(runtime: Runtime, wait: Callable[[], object] = lambda: None) -> Sequence[int]:
    """Suspend the job, call ``wait``, and resume it. An error ends the job with its exit code.

    Returns
    -------
    Sequence of int
        The signals whose handlers could not run meanwhile.
    """
    suspension = runtime.suspension

    def park() -> list[int]:
        late: list[int] = []
        with undisturbed(late=late), whole_or_ended(lambda: suspension.whole):
            try:
                suspension.suspend(explicit=runtime.boundaries.explicit)
                wait()
                suspension.resume()
            except GpusliceError as error:
                if suspension.whole:
                    end(error)
                raise
        return late

    try:
        return suspension.main_thread.park(park)
    except MainThreadStuckError as error:
        end(error)


def from_settings(runtime: Runtime) -> Drill | None:
    """Return the drill that the settings ask for; None if they ask for none."""
    settings = runtime.settings
    at = config.parse_boundaries(settings.suspend_at)
    return Drill(runtime, every=settings.suspend_every, at=at) if settings.suspend_every or at else None
