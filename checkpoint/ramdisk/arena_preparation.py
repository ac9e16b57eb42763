"""Making an arena ready before it is needed: in the background, at lower priority, in small steps.

Faulting in pages and locking them takes five to ten times as long as copying into them, and a suspend that
finds them ready only copies. Whoever needs the arena sooner does not wait for all of it: it says so, waits
for the step that is under way, and does the rest itself.
"""

from __future__ import annotations

import os
import threading

from gpuslice.errors import GpusliceError

from .arena import Arena

#: Begins with gpuslice's own prefix, which lets the thread pass the gate (``gpuslice.runtime.thread_gate``).
_THREAD = "gpuslice-warm-up"
#: Added to the thread's niceness. Not more: a suspend waits for the step under way, and where all cores are
#: busy a thread of the lowest priority takes seconds for it.
_NICER = 5


class WarmUp:
    """Makes one arena ready for ``nbytes``, from now on.

    Attributes
    ----------
    error
        Why it could not; the suspend that needs the arena will meet the same by itself.
    """

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self.error: GpusliceError | None = None
        self._arena = arena
        self._nbytes = nbytes
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Of this thread alone: on Linux a thread has a priority of its own.
        os.nice(_NICER)
        try:
            self._arena.warm(self._nbytes, lambda: not self._wanted.is_set())
        except GpusliceError as error:
            self.error = error

    def wait(self) -> None:
        """Let it come to its end."""
        self._thread.join()

    def stop(self) -> None:
        """Have it stop after the present step; then the arena is the caller's."""
        self._wanted.set()
        self._thread.join()
