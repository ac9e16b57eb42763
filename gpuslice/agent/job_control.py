"""SIGTSTP and SIGCONT for a job without a scheduler: it is off its device while it is stopped.

Ctrl-Z, ``kill -TSTP``, LSF's ``bstop`` and Slurm's ``scontrol suspend`` send SIGTSTP. The job parks at its
next boundary, then stops. A second SIGTSTP before that stops it where it is, as SIGSTOP does. SIGCONT brings
it back, or lets it go on from there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType

from gpuslice.agent.refusals import STILL_PARKED
from gpuslice.errors import GpusliceError
from gpuslice.runtime.boundaries import NEVER
from gpuslice.runtime.ending import deliver, end, say, undisturbed, whole_or_ended
from gpuslice.runtime.runtime import Runtime
from gpuslice.runtime.stopping import Act, Wish
from gpuslice.runtime.threads.main_thread import MainThreadStuckError

_TRY_AGAIN_S = 1.0


class JobControl:
    """A controller that parks the job and stops its process on SIGTSTP.

    Parameters
    ----------
    runtime
        The job.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._asked = False
        self._waking = False

    def start(self) -> None:
        """Handle both signals, unless the script does. A job of several ranks stops as any process does.

        Its ranks would stop at different boundaries, and wait for each other.
        """
        if self._runtime.identity.world_size > 1 or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL and signal.getsignal(signal.SIGCONT) in _FREE:
            signal.signal(signal.SIGTSTP, self._stop)
            signal.signal(signal.SIGCONT, self._go_on)

    def at_boundary(self, boundary: int) -> Sequence[int]:
        """Park and stop if that was asked for. Return the signals held back."""
        if not self._asked:
            self._look_again()
            return []
        if self._runtime.suspension.at_boundary(Wish.PARK) is not Act.PARK:
            return []
        late: list[int] = []
        try:
            late = self._runtime.suspension.main_thread.park(self._stay_away)
        except MainThreadStuckError as error:
            say(error.message, error.remedy)
            # Of this thread: when it returns SIGCONT has come, for which the main one runs no handler.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            self._asked = False
        self._look_again()
        return late

    def _look_again(self) -> None:
        """Come to the next boundary only if a SIGTSTP has come meanwhile."""
        self._runtime.boundaries.stop_at = NEVER
        if self._asked:  # asked after the line above: the handler may have run before it
            self._runtime.boundaries.stop_at = 0

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._asked and not self._waking:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            self._note(number)
            self._look_again()

    def _go_on(self, number: int, frame: FrameType | None) -> None:
        self._note(number)

    def _stay_away(self) -> list[int]:
        """Suspend the job, stop its process, and resume it. Return the signals held back.

        If the job cannot be suspended, only stop the process.
        """
        suspension, late = self._runtime.suspension, list[int]()
        with undisturbed(self._note, late=late), whole_or_ended(lambda: suspension.whole):
            try:
                suspension.suspend(explicit=self._runtime.boundaries.explicit)
            except GpusliceError as error:
                if not suspension.whole:
                    raise
                say(f"stopped on its device: {error.message}", error.remedy)
            self._stand_still()
            if suspension.away:
                self._come_back()
        own = (self._stop, self._go_on)  # they are noted already
        return [number for number in late if signal.getsignal(number) not in own]

    def _come_back(self) -> None:
        """Resume the job. While others have what it needs on its device, try again."""
        suspension, told = self._runtime.suspension, ""
        while suspension.away:
            try:
                suspension.resume()
            except GpusliceError as error:
                if suspension.whole:
                    end(error)
                if not isinstance(error, STILL_PARKED):
                    raise
                if error.message != told:
                    told = error.message
                    say(f"not back yet, tried again each second: {told}", error.remedy)
                time.sleep(_TRY_AGAIN_S)
                self._stand_still()

    def _note(self, number: int) -> None:
        """Take note of a signal.

        Python runs the handlers of signals that came during one call of C code by their numbers: SIGCONT
        first. A SIGTSTP of the same call counts as the earlier one, or nobody would wake the process.
        """
        if number == signal.SIGTSTP:
            self._asked = not self._waking
        elif number == signal.SIGCONT and not self._waking:
            self._waking = True
            try:
                deliver([number])
                time.sleep(0)  # all handlers that are due run
            finally:
                self._waking = self._asked = False

    def _stand_still(self) -> None:
        """Stop the process until SIGCONT comes, if it has not come already."""
        while self._asked:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0)  # the handler of the SIGCONT runs


#: SIGCONT has no handler.
_FREE = (signal.SIG_DFL, signal.SIG_IGN)
