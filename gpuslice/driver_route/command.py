"""``gpuslice run --route driver``: run any command, and take it off its GPUs while it is stopped.

gpuslice stays as the command's parent, because a process that is off its GPUs cannot call the driver itself.
SIGTSTP (Ctrl-Z, ``kill -TSTP``) suspends every process of the command that uses CUDA, then this one; SIGCONT
(``fg``, ``kill -CONT``) brings all back. Other signals go to the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

from gpuslice.config import Settings
from gpuslice.driver_route import switch
from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.kernels.routes import Ground, verdicts
from gpuslice.launch.command import check_driver_is_loaded, command_line
from gpuslice.launch.device_choice import named_device
from gpuslice.types import Route

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_OWN = (signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD)
#: Settings that need gpuslice inside the process.
_INSIDE = (
    *("suspend_every", "suspend_at", "checkpoint_every"),
    *("report", "job"),
)


def execute(words: Sequence[str], settings: Settings) -> int:
    """Run a command to its end, suspended and resumed on signals. Return its exit status.

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
    """Restore the signal mask, in the command. SIGTSTP is ignored: the command must run to be suspended."""
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _obey(received: signal.struct_siginfo, pid: int) -> None:
    number = received.si_signo
    if number == signal.SIGTSTP:
        if _switch("suspend", pid):
            os.kill(os.getpid(), signal.SIGSTOP)
    elif number == signal.SIGCONT:
        _switch("resume", pid)
    elif number != signal.SIGCHLD and received.si_code <= 0:  # the terminal's reach the command by themselves
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _switch(verb: str, pid: int) -> bool:
    """Suspend or resume in a process of its own, and return True if that worked.

    The driver's threads, in the process that uses it, take signals that are blocked here.
    """
    words = [sys.executable, "-m", switch.__name__, verb, str(pid)]
    try:
        return subprocess.run(words, stdin=subprocess.DEVNULL, check=False).returncode == 0
    except OSError as error:  # no process left, say; an exception would reach no caller
        sys.stderr.write(f"gpuslice: cannot {verb} the command: {error.strerror}\n")
        return False
