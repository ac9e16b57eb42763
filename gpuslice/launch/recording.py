"""The run of a command whose ranks record their steps, and the reading of the recordings."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from gpuslice.config import Settings
from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.launch.command import check, command_line, environment, rank_path
from gpuslice.profiler.recorder import Recording

_FILE = "profile.json"


@dataclass(frozen=True, slots=True)
class Recorded:
    """The result of a command: its exit status, as in a shell, and the recordings of its ranks in order."""

    status: int
    ranks: list[Recording]


def record(words: Sequence[str], settings: Settings, steps: int, directory: Path) -> Recorded:
    """Run ``words`` until each rank has recorded ``steps`` steps or ends by itself. Return the result.

    Parameters
    ----------
    directory
        An empty directory, into which the ranks write.

    Raises
    ------
    UsageError
        If there is nothing to run, or none of its processes trains.
    """
    path = directory / _FILE
    command = command_line(words)
    settings = check(msgspec.structs.replace(settings, profile=str(path), profile_steps=steps))
    status = _run(command, environment(settings, os.environ))
    ranks: list[Recording] = []
    while (found := rank_path(path, len(ranks))).exists():
        ranks.append(read(found))
    if not ranks:
        raise UsageError(
            f"nothing was recorded (exit status {status})", "the command has to import torch and train"
        )
    return Recorded(status, ranks)


def _run(command: Sequence[str], environ: dict[str, str]) -> int:
    """Run ``command`` and return its exit status. SIGTERM is passed on to it."""
    try:
        process = subprocess.Popen(command, env=environ)
    except OSError as error:
        raise UsageError(f"cannot execute {command[0]}: {error.strerror}", "check the command") from error

    def pass_on(signum: int, frame: FrameType | None) -> None:
        process.send_signal(signum)

    # A terminal's Ctrl-C reaches the command by itself.
    former = {
        signum: signal.signal(signum, handler)
        for signum, handler in ((signal.SIGTERM, pass_on), (signal.SIGINT, signal.SIG_IGN))
    }
    try:
        code = process.wait()
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)
    return code if code >= 0 else 128 - code


def read(path: Path) -> Recording:
    """Return the recording in a file.

    Raises
    ------
    EnvironmentUnusableError
        If the file holds none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Recording)
    except (OSError, msgspec.DecodeError) as error:
        raise EnvironmentUnusableError(f"the recording {path} cannot be read: {error}") from error
