"""``gpuslice run --route driver``: any command; while this is stopped, it is off its GPUs.

gpuslice stays as the command's parent, because a process that is off its GPUs cannot call the driver itself.
SIGTSTP (Ctrl-Z, ``kill -TSTP``) suspends every process of the command that uses CUDA, then this one; SIGCONT
(``fg``, ``kill -CONT``) brings all back. Other signals go to the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from gpuslice.config import Settings
from gpuslice.errors import EnvironmentUnusableError, GpusliceError, NoCudaError, RollbackError, UsageError
from gpuslice.kernels.driver import Process, ProcessState
from gpuslice.kernels.routes import Ground, verdicts
from gpuslice.launch import adopted
from gpuslice.launch.command import check_driver_is_loaded, command_line
from gpuslice.launch.device_choice import named_device
from gpuslice.types import Route

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_OWN = (signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD)
#: Settings that need gpuslice inside of the process.
_INSIDE = (
    *("suspend_every", "suspend_at", "checkpoint_every", "lazy_resume", "recreate_groups"),
    *("report", "job", "standby"),
)


def execute(words: Sequence[str], settings: Settings) -> int:
    """Run a command to its end, suspended and resumed meanwhile as signals say; its exit status.

    Raises
    ------
    UsageError
        For settings that this route cannot have.
    EnvironmentUnusableError
        If the driver cannot do it.
    """
    command = command_line(words)
    _check(settings)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signals = {*_FORWARDED, *_OWN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        child = subprocess.Popen(command, preexec_fn=lambda: _restore_signals(before))
    except OSError as error:
        raise UsageError(f"cannot execute {command[0]}: {error.strerror}", "check the command") from error
    while child.poll() is None:
        _obey(signal.sigwaitinfo(signals), child.pid)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _check(settings: Settings) -> None:
    defaults = Settings()
    for name in _INSIDE:
        if getattr(settings, name) != getattr(defaults, name):
            option = name.replace("_", "-")
            raise UsageError(
                f"--{option} cannot be had with --route driver: gpuslice is not inside of the process",
                "leave it out, or use --route tensor",
            )
    device = named_device(settings.device, Route.DRIVER)
    assert device is not None
    check_driver_is_loaded(settings, device)
    verdict = verdicts(device.kind, Ground.here())[Route.DRIVER]
    if not verdict.available:
        raise EnvironmentUnusableError(
            f"the route driver cannot be taken on {device}: {verdict.reason}", verdict.remedy
        )
    if settings.device:
        raise UsageError(
            f"--device {device} cannot be had with --route driver: the command chooses its GPUs itself",
            "set CUDA_VISIBLE_DEVICES instead",
        )


def _restore_signals(mask: Iterable[int]) -> None:
    """In the command. Ctrl-Z reaches it, too, but it must run to be taken off its GPUs."""
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _obey(received: signal.struct_siginfo, pid: int) -> None:
    number = received.si_signo
    if number == signal.SIGTSTP:
        if _tell("suspended", lambda: suspend_all(processes(pid))):
            os.kill(os.getpid(), signal.SIGSTOP)
    elif number == signal.SIGCONT:
        _tell("resumed", lambda: resume_all(processes(pid)))
    elif number != signal.SIGCHLD and received.si_code <= 0:  # the terminal's reach the command by themselves
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _tell(what: str, act: Callable[[], int]) -> bool:
    """Say on stderr what came of it; nobody is there to whom an error could be raised."""
    try:
        count = act()
    except GpusliceError as error:
        sys.stderr.write(f"gpuslice: not {what}: {error}\n")
        return False
    sys.stderr.write(f"gpuslice: {what} {count} process{'es' if count != 1 else ''}\n")
    return True


def processes(pid: int) -> list[Process]:
    """The process and its descendants that use CUDA, by id."""
    try:
        root = psutil.Process(pid)
        pids = sorted({pid, *(child.pid for child in root.children(recursive=True))})
    except psutil.NoSuchProcess:
        return []
    found = []
    for each in filter(_has_driver, pids):
        process = Process(each)
        with suppress(NoCudaError):  # a loader's worker, say, which has the library from its parent
            process.state  # noqa: B018 - the driver is asked
            found.append(process)
    return found


def _has_driver(pid: int) -> bool:
    try:
        return "libcuda.so" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it ended meanwhile
        return False


def suspend_all(found: Sequence[adopted.CheckpointableProcess]) -> int:
    """All of them or none: if one is refused, those that were suspended before it come back."""
    done: list[adopted.CheckpointableProcess] = []
    try:
        for process in found:
            adopted.suspend(process)
            done.append(process)
    except GpusliceError as refusal:
        try:
            resume_all(done)
        except GpusliceError as error:
            raise RollbackError(
                f"{refusal.message}; and of those suspended before, not all came back: {error.message}",
                "send SIGCONT to try again",
            ) from refusal
        raise
    return len(done)


def resume_all(found: Sequence[adopted.CheckpointableProcess]) -> int:
    """All that are not running; an error leaves the rest for the next try."""
    away = [process for process in found if process.state is not ProcessState.RUNNING]
    for process in away:
        adopted.resume(process)
    return len(away)
