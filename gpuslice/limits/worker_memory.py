"""The part of a rank's memory limit that its child processes take: mostly workers of a DataLoader.

The kernel applies a limit to each process (``RLIMIT_DATA``). So the rest of the job's limit is given to each
of its processes alike, and adjusted several times a second. Each allocation is still bounded where it is
made, and memory that one process has taken is not available to the others.
"""

from __future__ import annotations

import functools
import multiprocessing.util
import os
import resource
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpuslice.checkpoint.gate import OWN_PREFIX
from gpuslice.errors import hide_own_frames

#: Interval at which the limit is shared while there are such processes.
_SHARE_AGAIN_S = 0.2


class WorkerMemory:
    """The descendants of this process, and the memory that they have taken.

    A process counts from its parent's memory at the fork, or, if it runs another program, from this process's
    first memory: that of imported torch. So memory that a fork shares with its parent does not count, nor do
    copies of single pages.

    Parameters
    ----------
    first_bytes
        What this process had when its limit began.
    """

    def __init__(self, first_bytes: int) -> None:
        self._first_bytes = first_bytes
        self._have_bytes: dict[int, int] = {}
        self._before_bytes: dict[int, int] = {}

    def taken_bytes(self, own_bytes: int) -> int:
        """Return what the processes have taken together; ``own_bytes`` is this process's memory."""
        found = {pid: private_bytes(pid) for pid in _below(os.getpid())}
        self._have_bytes = {pid: has for pid, has in found.items() if has}
        self._before_bytes = {
            pid: self._before_bytes.get(pid, min(own_bytes, max(has, self._first_bytes)))
            for pid, has in self._have_bytes.items()
        }
        return sum(max(0, has - self._before_bytes[pid]) for pid, has in self._have_bytes.items())

    def allow(self, room_bytes: int) -> int:
        """Let each process allocate this much more, and no more. Return their number."""
        for pid, has in self._have_bytes.items():
            with suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's now
                _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
                resource.prlimit(pid, resource.RLIMIT_DATA, (bounded(has + room_bytes, hard), hard))
        return len(self._have_bytes)


class Watch:
    """A thread that shares the limit again and again while there are other processes, and sleeps otherwise.

    It wakes up when Python code starts a process. A process that C code starts is found at the next such
    time.

    Parameters
    ----------
    share
        Does so, and says how many processes there are besides this one.
    """

    def __init__(self, share: Callable[[], int]) -> None:
        self._share = share
        self._awake = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"{OWN_PREFIX}memory", daemon=True)

    def start(self) -> None:
        """Start the thread; it watches until `end`."""
        os.register_at_fork(after_in_parent=self._awake.set)
        # By these two it forks without those functions: a program, and a worker that is spawned.
        _after_each(subprocess.Popen, "__init__", self._awake.set)
        _after_each(multiprocessing.util, "spawnv_passfds", self._awake.set)
        self._thread.start()

    def end(self) -> None:
        """Stop the thread and wait for it."""
        self._ended = True
        self._awake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended:
            self._awake.clear()
            others = 1  # until it is known
            with suppress(MemoryError, OSError):  # at the very limit this can fail, too; it is tried again
                others = self._share()
            self._awake.wait(_SHARE_AGAIN_S if others else None)


def _after_each(owner: object, name: str, act: Callable[[], object]) -> None:
    """Make each call of ``owner``'s function ``name`` end with a call of ``act``, also a failed one."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except BaseException as error:
            hide_own_frames(error)
            raise
        finally:
            act()

    setattr(owner, name, call)


def private_bytes(pid: int) -> int:
    """Return the bytes of a process that ``RLIMIT_DATA`` counts; 0 if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        for line in status.splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    return 0


def bounded(soft_bytes: int, *bounds: int) -> int:
    """Return the least of these limits, without infinite ones."""
    infinity = resource.RLIM_INFINITY
    return min((bound for bound in (soft_bytes, *bounds) if bound != infinity), default=infinity)


def _below(pid: int) -> list[int]:
    """Return the descendants of a process (children, their children, and so on)."""
    children: list[int] = []
    with suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            with suppress(OSError):
                children += map(int, Path(task.path, "children").read_text(encoding="ascii").split())
    return [*children, *(grandchild for child in children for grandchild in _below(child))]
