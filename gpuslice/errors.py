"""Every error that gpuslice raises, split by whose fault it is, with the exit code the CLI maps it to.

Exit codes: 2 wrong command line or configuration, 3 unusable environment, 4 corrupt or refused
snapshot or journal, 5 full RAM disk. A message names the thing that is wrong; ``remedy`` says what to do.
"""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import ClassVar

#: What a process says that ends because it has not got its job's state any more; not its script's fault.
WITHOUT_STATE = "the process ends without its job's state, whose snapshots are kept"
#: What an out-of-memory error says that comes of the job's own limit.
OVER_MEMORY_LIMIT = "out of memory: the job's memory limit"


class GpusliceError(Exception):
    """Base of all gpuslice errors; never raised itself.

    Parameters
    ----------
    message
        What is wrong, naming the thing.
    remedy
        What the user can do about it, one sentence.
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
        """What a command says of it on stderr."""
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
        Its path.
    """

    def __init__(self, directory: str) -> None:
        super().__init__(f"no scheduler runs in {directory}", "start one with `gpuslice up`")
        self.directory = directory


class NodeLostError(EnvironmentUnusableError):
    """A node, or gpuslice's process on it, has gone; what had arrived elsewhere stays and is used again."""


class AddressSpaceError(EnvironmentUnusableError):
    """The process may map no more memory. Nothing has changed; with more of it one may try again."""


class SuspendRefusedError(EnvironmentUnusableError):
    """The job's state cannot be suspended by the chosen route; nothing was touched."""


class NoCudaError(EnvironmentUnusableError):
    """The driver knows nothing of a process: it has not begun CUDA."""


class SwitchFailedError(EnvironmentUnusableError):
    """A suspend or a resume met an error that is not gpuslice's: of CUDA, of torch, of the system."""


class SuspendedStateError(UsageError):
    """A suspended job was asked to suspend, or a running one to resume."""


class TensorParkedError(UsageError, RuntimeError):
    """A tensor of a suspended job was touched: its memory is away until the job is resumed.

    Also a ``RuntimeError``, because that is what torch raises where gpuslice cannot say more.
    """


class SnapshotError(GpusliceError):
    """Base of what can be wrong with a snapshot file; never raised itself."""

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
    """A newer snapshot took the place of the one that was being read; that one can be read instead."""


class RamDiskFullError(GpusliceError):
    """The RAM disk cannot take the snapshot; nothing was written."""

    exit_code = 5


class DeviceMemoryError(GpusliceError):
    """The device lacks memory to resume; the snapshot is kept and the resume may be retried."""

    exit_code = 3


class RollbackError(GpusliceError):
    """Undoing a failed step failed too; the state of the job is not known."""

    exit_code = 3


class ProtocolError(GpusliceError):
    """Base of what can go wrong between two ends of a socket; never raised itself."""

    exit_code = 3

    def __init__(self, message: str, remedy: str = "") -> None:
        if type(self) is ProtocolError:
            raise TypeError("ProtocolError is abstract; raise LocalProtocolError or RemoteProtocolError")
        super().__init__(message, remedy)


class LocalProtocolError(ProtocolError):
    """We were about to send something illegal: a bug on our side."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something illegal; the message was dropped and the state is unchanged."""


class UnforeseenError(GpusliceError):
    """A bug, met while one message or event was dealt with; nothing was changed by that."""


class IllegalTransitionError(GpusliceError):
    """An event is impossible in the present state; nothing was changed. Carries the history."""


class InvariantError(GpusliceError):
    """A promise of the scheduler core is broken: a bug, found by ``Core.check``."""


def where_raised(error: Exception) -> str:
    """``error`` in one line, with where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def hide_own_frames(error: BaseException, *, keep_bugs: bool = False) -> None:
    """Drop the leading frames of gpuslice from the traceback of a script's error that passes through it.

    To be called in the ``except`` of the outermost function of gpuslice that the error passes, right before
    a bare ``raise``: Python adds no frame for that one. So the script's traceback is as without gpuslice.

    Parameters
    ----------
    keep_bugs
        Whether an error that was raised in gpuslice itself keeps all of its frames.
    """
    if isinstance(error, GpusliceError):
        return
    trace = error.__traceback__
    while trace is not None and _is_own(trace):
        trace = trace.tb_next
    if trace is not None or not keep_bugs:
        error.__traceback__ = trace


def hide_all_own_frames(error: BaseException) -> None:
    """Drop the frames of gpuslice from all tracebacks that Python prints of a script's error.

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
