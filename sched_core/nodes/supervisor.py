"""Start one job's command and record how it ended, also if the scheduler is gone.

    supervisor.py DESCRIPTOR COMMAND [ARGUMENTS]...

``DESCRIPTOR`` is the job's record, locked by its starter; the lock lasts as long as this process.
Processes that the command leaves behind are ended with it, unless ``GPUSLICE_KEEP_CHILDREN`` is set. A
signal to end goes to the command alone, and to processes that it leaves behind once it has ended. On another
node than the scheduler's, all of it stands still while the node's lease is over, also without an agent.
The record has two lines of fixed length, our process id and the exit code (negative: a signal), so that the
second is written in place, on a full disk, too. Run as a script and without ``site``, standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

LINE_BYTES = 16
#: Signals that end a job also reach this process, which belongs to its group, and must outlive the job.
_OUTLIVED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: prctl(2)
_PR_SET_CHILD_SUBREAPER = 36
#: Variable of the setting ``keep_children``.
_KEEP = "GPUSLICE_KEEP_CHILDREN"
#: Time between SIGTERM and SIGKILL.
_GRACE_S = 3.0
_LOOK_AGAIN_S, _LOOK_AGAIN_AT_MOST_S = 0.02, 0.2
#: As in lease.py: variable of jobs that may not run without a lease, and the interval of checks.
_LEASED = "GPUSLICE_LEASED"
_LEASE_AGAIN_S = 1.0
#: Variable with the socket of its ranks, which lies beside the lease.
_SOCKET = "GPUSLICE_SOCKET"


def line(number: int | None) -> bytes:
    """Return one line of the exit record. None means that the number is not known yet."""
    return b"%-15s\n" % (b"" if number is None else b"%d" % number)


def main(argv: list[str]) -> None:
    """Supervise ``argv[2:]``, with the record at descriptor ``argv[1]``."""
    record, command = int(argv[1]), argv[2:]
    os.set_inheritable(record, False)
    # Until the command is there, signals meant for it wait here.
    signal.pthread_sigmask(signal.SIG_BLOCK, _OUTLIVED)
    os.pwrite(record, line(os.getpid()) + line(None), 0)
    _adopt_orphans()  # before there are any: a command may leave a process behind and end at once
    child = os.fork()
    if child == 0:
        _become(command)
    asked = _pass_on(os.pidfd_open(child))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUTLIVED)
    if _LEASED in os.environ:
        directory = os.path.dirname(os.environ[_SOCKET].removeprefix("ipc://"))
        _LeaseWatch(os.path.join(directory, "lease")).begin()
    pid, status = os.wait()
    while pid != child:
        pid, status = os.wait()
    os.pwrite(record, line(os.waitstatus_to_exitcode(status)), LINE_BYTES)
    if asked or os.environ.get(_KEEP, "").lower() not in ("1", "true"):
        with suppress(ChildProcessError):
            _end_orphans(asked)


def _pass_on(command: int) -> list[int]:
    """Pass every later SIGTERM or the like on to the process of descriptor ``command``, each once.

    Returns
    -------
    list of int
        Those that have come so far.
    """
    asked: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        if number not in asked:  # a second one would interrupt the handler of the first
            asked.append(number)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(command, number)

    for number in _OUTLIVED:
        signal.signal(number, pass_on)
    return asked


class _LeaseWatch:
    """Stops all processes of the command while the lease is over, since the agent may be gone.

    A lease that cannot be read is left to the agent.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._stopped = False

    def begin(self) -> None:
        """Check the lease now, and again for as long as this process lives, beside its main thread."""
        signal.signal(signal.SIGALRM, lambda number, frame: self._look())
        self._look()

    def _look(self) -> None:
        left_s = _LEASE_AGAIN_S
        with suppress(OSError, ValueError, IndexError):
            with open(self._path) as file:
                left_s = float(file.read().split()[0]) - time.clock_gettime(time.CLOCK_BOOTTIME)
            if left_s <= 0.0:
                self._stopped = True
                _signal_descendants(signal.SIGSTOP)
            elif self._stopped:
                self._stopped = False
                _signal_descendants(signal.SIGCONT)
        signal.setitimer(signal.ITIMER_REAL, left_s if 0.0 < left_s < _LEASE_AGAIN_S else _LEASE_AGAIN_S)


def _signal_descendants(number: signal.Signals) -> None:
    """Send a signal to all descendants of the command, and to those that they start meanwhile."""
    told: set[int] = set()
    while new := _descendants() - told:
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        told |= new


def _end_orphans(asked: list[int]) -> None:
    """End all processes that the command left behind, and those that they leave behind in turn.

    If we were ``asked`` to end, the asking process kills what takes too long.

    Raises
    ------
    ChildProcessError
        When no child is left.
    """
    late_s = time.monotonic() + _GRACE_S
    told: set[int] = set()
    pause_s = _LOOK_AGAIN_S
    while True:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        late = time.monotonic() >= late_s and not asked
        for pid in _children() - (set() if late else told):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            told.add(pid)
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _LOOK_AGAIN_AT_MOST_S)


def _children() -> set[int]:
    """Return the processes whose parent is this process."""
    return {pid for pid, parent in _parents().items() if parent == os.getpid()}


def _descendants() -> set[int]:
    """Return all descendants of this process."""
    parents = _parents()
    found = newer = {os.getpid()}
    while newer:
        newer = {pid for pid, parent in parents.items() if parent in newer}
        found = found | newer
    return found - {os.getpid()}


def _parents() -> dict[int, int]:
    """Return the parent of every process."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as status:
            # The name, in brackets, may hold anything; the state and the parent follow it.
            found[int(name)] = int(status.read().rpartition(b")")[2].split()[1])
    return found


def _adopt_orphans() -> None:
    """Become the parent of processes that the command leaves behind."""
    import ctypes  # late: reading records does not need it

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _become(command: list[str]) -> None:
    for number in (*_OUTLIVED, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUTLIVED)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"gpuslice: cannot start {command[0]}: {error.strerror}\n".encode())
    # The shell's convention for a command that cannot be executed.
    os._exit(127)


if __name__ == "__main__":
    main(sys.argv)
