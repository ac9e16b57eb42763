"""What the processes that a rank has started take of its memory limit: the workers of a DataLoader, mostly.

The kernel keeps a limit for each process (``RLIMIT_DATA``). So the room that the job has left is given to all
of its processes alike, anew several times a second. Each allocation is still bounded where it is made, and
what one process has taken the others cannot take.
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

#: How often the room is shared out while there are such processes.
_SHARE_AGAIN_S = 0.2


class WorkerMemory:
    """The processes below this one, and theirs, and what they have taken.

    A process counts from what its parent had when it was forked, or, if it runs a program of its own, from
    what this process had at first: then it had imported torch. Memory that a fork shares with its parent so
    does not count, nor do the copies of single pages of it.

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
        """What they have taken together, as of now; ``own_bytes`` is what this process has."""
        found = {pid: private_bytes(pid) for pid in _below(os.getpid())}
        self._have_bytes = {pid: has for pid, has in found.items() if has}
        self._before_bytes = {
            pid: self._before_bytes.get(pid, min(own_bytes, max(has, self._first_bytes)))
            for pid, has in self._have_bytes.items()
        }
        return sum(max(0, has - self._before_bytes[pid]) for pid, has in self._have_bytes.items())

    def allow(self, room_bytes: int) -> int:
        """Let each of them allocate so much more, and no more; how many there are."""
        for pid, has in self._have_bytes.items():
            with suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's now
                _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
                resource.prlimit(pid, resource.RLIMIT_DATA, (bounded(has + room_bytes, hard), hard))
        return len(self._have_bytes)


class Watch:
    """A thread that shares the room out again and again while there are others, and sleeps otherwise.

    It wakes up when Python code starts a process; one that C code starts is found with the next of those.

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
        """Watch from now on, until `end`."""
        os.register_at_fork(after_in_parent=self._awake.set)
        # By these two it forks without those functions: a program, and a worker that is spawned.
        _after_each(subprocess.Popen, "__init__", self._awake.set)
        _after_each(multiprocessing.util, "spawnv_passfds", self._awake.set)
        self._thread.start()

    def end(self) -> None:
        """Watch no more; the thread has ended then."""
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
    """Call ``act`` whenever this function has been called, also if that failed."""
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
    """What ``RLIMIT_DATA`` counts of a process, in bytes; 0 if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        for line in status.splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    return 0


def bounded(soft_bytes: int, *bounds: int) -> int:
    """The least of these that are limits at all."""
    infinity = resource.RLIM_INFINITY
    return min((bound for bound in (soft_bytes, *bounds) if bound != infinity), default=infinity)


def _below(pid: int) -> list[int]:
    """The processes that ``pid`` has started, and those that they have."""
    children: list[int] = []
    with suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            with suppress(OSError):
                children += map(int, Path(task.path, "children").read_text(encoding="ascii").split())
    return [*children, *(grandchild for child in children for grandchild in _below(child))]
