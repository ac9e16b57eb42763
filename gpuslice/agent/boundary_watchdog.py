"""A thread that reports where a script is that passes no boundary: such a job cannot be suspended.

It looks at the count of boundaries once a second. The training itself does no extra work.
"""

from __future__ import annotations

import os
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

from gpuslice.checkpoint.discover import pending_collectives
from gpuslice.checkpoint.discover.thread_stacks import stack_of
from gpuslice.checkpoint.gate import OWN_PREFIX
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.ending import say
from gpuslice.runtime.threads.thread_gate import knows_torch
from gpuslice.types import shortened

#: Seconds without a boundary after which the script is reported.
PATIENCE_S = 10.0
_LOOK_AGAIN_S = 1.0
#: Least share of a core that a computing thread uses. Waiting for data or for processes uses less.
_COMPUTES = 0.2
_PLACE_CHARACTERS = 200
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
#: Value of ``stuck`` while collectives are pending. ``gpuslice ps`` writes "no boundary" before it.
_UNUSABLE = "without a pending collective"
_REMEDY = "call gpuslice.boundary() between two mini-batches; docs/run.md says what is a boundary by itself"


class BoundaryWatchdog:
    """A watch over the thread that trains: the main thread, until another thread trains.

    Parameters
    ----------
    boundaries
        The process's counter.
    asked
        Returns True if the job is asked to park at this moment.
    tell
        Writes a message to stderr.
    pending_for_s
        Returns for how long a collective has been pending at every boundary that mattered.

    Attributes
    ----------
    obstacle
        What is wrong with the boundaries that are passed, if the job cannot park at them; else empty.
    stuck
        Where the script is if it passes no boundary, or why its boundaries cannot be used. Empty while all
        is well.
    """

    def __init__(
        self,
        boundaries: BoundaryCounter,
        asked: Callable[[], bool] = lambda: False,
        tell: Callable[..., None] = say,
        pending_for_s: Callable[[], float] = pending_collectives.pending_for_s,
    ) -> None:
        self.stuck = self.obstacle = ""
        self._boundaries = boundaries
        self._asked = asked
        self._tell = tell
        self._looked_at = threading.main_thread()
        self._told: set[str] = set()
        self._count = boundaries.count
        self._since: tuple[float, float] | None = None
        self._asked_since_s: float | None = None
        self._pending_for_s = pending_for_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{OWN_PREFIX}watch", daemon=True)

    def start(self) -> None:
        """Start the watchdog's thread, which runs until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """End the watchdog's thread, and wait until it has ended."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set() and threading.main_thread().is_alive():
            thread = self._boundaries.thread.thread
            if thread is not self._looked_at:
                self._looked_at, self._since = thread, None
            self.look(time.monotonic(), _busy_s(thread), partial(stack_of, thread.ident or 0))
            self._stopping.wait(_LOOK_AGAIN_S)

    def look(self, now_s: float, busy_s: float, stack: Callable[[], Sequence[FrameType]]) -> None:
        """Check once whether the script is stuck. Set ``stuck``, and report a stuck script.

        Parameters
        ----------
        now_s, busy_s
            The time, and how much processor time the thread has used so far.
        stack
            Returns the thread's frames, innermost first. Called only if no boundary was passed since the last
            look.
        """
        count, asked = self._boundaries.count, self._asked()
        if not asked:
            self._asked_since_s = None
        frames = stack() if count == self._count else ()
        if self._since is None or not frames or _is_ours(frames):
            self._count, self._since = count, (now_s, busy_s)
            self._asked_since_s, self.stuck = (now_s if asked else None), self._unusable()
            return
        if asked and self._asked_since_s is None:
            self._asked_since_s = now_s
        since_s, busy_before_s = self._since
        if self._asked_since_s is not None and now_s - self._asked_since_s >= PATIENCE_S:
            self._name(frames, f"was asked to park {PATIENCE_S:g} s ago, and has passed no boundary")
        elif now_s - since_s >= PATIENCE_S:
            if busy_s - busy_before_s >= _COMPUTES * (now_s - since_s) and _computes(frames):
                self._name(frames, f"has computed for {PATIENCE_S:g} s without a boundary")
            elif not self.stuck:
                self._since = now_s, busy_s

    def _unusable(self) -> str:
        """Return why the job could park at none of the latest boundaries; empty if it could."""
        if self._pending_for_s() < PATIENCE_S:
            return self.obstacle
        what = f"has passed no boundary {_UNUSABLE} for {PATIENCE_S:g} s, and cannot be suspended"
        if what not in self._told:
            self._told.add(what)
            self._tell(f"the script {what}", pending_collectives.REMEDY)
        return _UNUSABLE

    def _name(self, frames: Sequence[FrameType], what: str) -> None:
        location = _location(frames)
        self.stuck = f"at {location}"
        if what not in self._told:
            self._told.add(what)
            name = self._looked_at.name if self._looked_at is not threading.main_thread() else ""
            who = f"thread {name!r}" if name else "main thread"
            self._tell(f"the script {what}: its {who} is at {location}", _REMEDY)


def _busy_s(thread: threading.Thread) -> float:
    """Return how much processor time a thread has used; 0 if it has ended.

    It reads the kernel's file: ``pthread_getcpuclockid`` of a thread that has just ended is undefined.
    """
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat", "rb") as status:
            # The thread's name, in brackets, may hold spaces and brackets.
            words = status.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _is_ours(frames: Sequence[FrameType]) -> bool:
    """Return True if the thread executes gpuslice, for instance because it is parked."""
    return any(_module(one).startswith("gpuslice.") for one in frames)


def _is_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return not name.startswith((*_LIBRARIES, "<frozen")) and not _module(frame).startswith("torch.")


def _location(frames: Sequence[FrameType]) -> str:
    """Return file, line and function of the innermost frame of the user's code, which is no library's."""
    found = next(filter(_is_users, frames), frames[0])
    code = found.f_code
    return shortened(f"{code.co_filename}:{found.f_lineno}, in {code.co_name}", _PLACE_CHARACTERS)


def _computes(frames: Sequence[FrameType]) -> bool:
    """Return True if the thread executes torch, or code that uses torch, and no import."""
    if any(_module(one).startswith("importlib.") for one in frames):
        return False
    return any(
        name.startswith("torch.") and not name.startswith("torch.multiprocessing")
        for name in map(_module, frames)
    ) or knows_torch(next(filter(_is_users, frames), frames[0]))
