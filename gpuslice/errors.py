"""All errors that gpuslice raises, by whose fault they are, with the exit code of each.

Exit codes: 2 wrong command line or configuration, 3 unusable environment, 4 corrupt or refused
snapshot or journal, 5 full RAM disk. A message names the thing that is wrong. ``remedy`` says what to do.
"""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import ClassVar

#: Last message of a process that ends because it has lost its job's state. It is no fault of the script.
WITHOUT_STATE = "the process ends without its job's state, whose snapshots are kept"
#: Text of an out-of-memory error that the job's own limit causes.
OVER_MEMORY_LIMIT = "out of memory: the job's memory limit"


class GpusliceError(Exception):
    """Base of all gpuslice errors; never raised itself.

    Parameters
    ----------
    message
        Text that names the thing that is wrong.
    remedy
        One sentence on what the user can do.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        if type(self) is GpusliceError:
            raise TypeError("GpusliceError is abstract; raise one of its subclasses")
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    @property
    def lines(self) -> str:
        """The lines that a command writes to stderr for this error."""
        return "".join(f"gpuslice: {text}\n" for text in (self.message, self.remedy) if text)


class UsageError(GpusliceError):
    """The command line or an API call is wrong."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting has an unknown name or an impossible value."""


class EnvironmentUnusableError(GpusliceError):
    """This machine lacks what was asked for (device, driver, torch, compiler, directory)."""

    exit_code = 3


class NoSchedulerError(EnvironmentUnusableError):
    """No scheduler runs in a state directory.

    Attributes
    ----------
    directory
        The state directory's path.
    """

    def __init__(self, directory: str) -> None:
        super().__init__(f"no scheduler runs in {directory}", "start one with `gpuslice up`")
        self.directory = directory


class NodeLostError(EnvironmentUnusableError):
    """A node, or gpuslice's process on it, is gone. Data that has arrived elsewhere is kept for reuse."""


class StateGoneError(GpusliceError):
    """No node that can be reached has a whole snapshot of a job."""

    exit_code = 6


class AddressSpaceError(EnvironmentUnusableError):
    """The process may map no more memory. Nothing has changed; a retry may work once there is more memory."""


class SuspendRefusedError(EnvironmentUnusableError):
    """The job's state cannot be suspended by the chosen route. Nothing was changed."""


class NoCudaError(EnvironmentUnusableError):
    """The driver does not know a process, because the process has not begun CUDA."""


class SwitchFailedError(EnvironmentUnusableError):
    """A suspend or a resume failed with an error of CUDA, of torch or of the system."""


class SuspendedStateError(UsageError):
    """A suspended job was asked to suspend, or a running one to resume."""


class TensorParkedError(UsageError, RuntimeError):
    """A tensor of a suspended job was used. Its memory is away until the job is resumed.

    It is also a ``RuntimeError``, because torch raises that where gpuslice cannot say more.
    """


class SnapshotError(GpusliceError):
    """Base of the errors about a snapshot file; never raised itself."""

    exit_code = 4

    def __init__(self, message: str, remedy: str = "") -> None:
        if type(self) is SnapshotError:
            raise TypeError("SnapshotError is abstract; raise one of its subclasses")
        super().__init__(message, remedy)


class CorruptSnapshotError(SnapshotError):
    """The bytes are not what was written: truncated, flipped, or not a snapshot at all."""


class RefusedSnapshotError(SnapshotError):
    """The file is whole but may not or cannot be used: foreign owner, symlink, other version, other shape."""


class ReplacedSnapshotError(SnapshotError):
    """A newer snapshot replaced the file while it was being read. The newer one can be read instead."""


class RamDiskFullError(GpusliceError):
    """The RAM disk cannot take the snapshot; nothing was written."""

    exit_code = 5


class DeviceMemoryError(GpusliceError):
    """The device lacks memory to resume. The snapshot is kept, and the resume may be retried."""

    exit_code = 3


class RollbackError(GpusliceError):
    """Undoing a failed step failed, too. The state of the job is not known."""

    exit_code = 3


class ProtocolError(GpusliceError):
    """Base of the errors between the two ends of a socket; never raised itself."""

    exit_code = 3

    def __init__(self, message: str, remedy: str = "") -> None:
        if type(self) is ProtocolError:
            raise TypeError("ProtocolError is abstract; raise LocalProtocolError or RemoteProtocolError")
        super().__init__(message, remedy)


class LocalProtocolError(ProtocolError):
    """This process was about to send an illegal message: a bug in gpuslice."""


class RemoteProtocolError(ProtocolError):
    """The peer sent an illegal message. It was dropped, and nothing has changed."""


class UnforeseenError(GpusliceError):
    """A bug that showed while one message or event was handled. That message or event changed nothing."""


class IllegalTransitionError(GpusliceError):
    """An event is impossible in the present state. Nothing was changed. The error carries the history."""


class InvariantError(GpusliceError):
    """An invariant of the scheduler core is broken: a bug, found by ``Core.check``."""


def last_line(error: Exception) -> str:
    """Return the last line of what ``error`` says, or its type's name if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def where_raised(error: Exception) -> str:
    """Return ``error`` in one line, with the file and line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def hide_own_frames(error: BaseException, *, keep_bugs: bool = False) -> None:
    """Drop the leading frames of gpuslice from the traceback of a script's error.

    Call it in the ``except`` of the outermost function of gpuslice that the error passes, right before a bare
    ``raise``: Python adds no frame for that function. So the script's traceback is as without gpuslice.

    Parameters
    ----------
    keep_bugs
        True to keep all frames of an error that was raised in gpuslice itself.
    """
    if isinstance(error, GpusliceError):
        return
    trace = error.__traceback__
    while trace is not None and _is_own(trace):
        trace = trace.tb_next
    if trace is not None or not keep_bugs:
        error.__traceback__ = trace


def hide_all_own_frames(error: BaseException) -> None:
    """Drop the frames of gpuslice from all tracebacks that Python prints for a script's error.

    An error that was raised in gpuslice keeps its frames: it is a bug.
    """
    left, seen = [error], set[int]()
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        _drop_own_frames(each)
        left += filter(None, (each.__cause__, each.__context__))
        left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()


def _drop_own_frames(error: BaseException) -> None:
    entries: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    interrupted = isinstance(error, KeyboardInterrupt)
    if isinstance(error, GpusliceError) or not entries or (_is_own(entries[-1]) and not interrupted):
        return
    shown = [entry for entry in entries if not _is_own(entry)]
    for entry, following in zip(shown, [*shown[1:], None], strict=True):
        entry.tb_next = following
    error.__traceback__ = shown[0] if shown else None


def _is_own(trace: TracebackType) -> bool:
    """Return True if a traceback's first frame is of a module of gpuslice."""
    return str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] == "gpuslice"
