"""``gpuslice up`` in the background: start it, wait for it, and print its errors even on a full disk.

Until it can be used, the process talks to whoever started it through a pipe: text for people, at last one
byte that is none. What it writes to stderr besides is in its log, if that can be written.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from gpuslice.errors import EnvironmentUnusableError, GpusliceError
from gpuslice.files import private_directory

LOG = "scheduler.log"
#: After it, nothing follows.
_READY = b"\0"


def start(directory: Path, words: Sequence[str]) -> int:
    """Start ``gpuslice up`` with ``words`` in the background. Return its process id once it can be used.

    What it has to say until then is written to stderr.

    Raises
    ------
    SystemExit
        If it ends instead, with its exit code.
    EnvironmentUnusableError
        If it cannot be started, or ends without a word.
    """
    private_directory(directory, option="--state-dir", parents=True, by_link=True)
    try:
        log = (directory / LOG).open("ab")
    except OSError as error:
        raise EnvironmentUnusableError(
            f"cannot write {directory / LOG}: {error.strerror}", "make room, or choose another --state-dir"
        ) from error
    with log:
        begins = log.tell()
        receiving, sending = os.pipe()
        with os.fdopen(receiving, "rb", buffering=0) as answer:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpuslice", "up", *words, "--ready-fd", str(sending)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[sending],
                start_new_session=True,
            )
            os.close(sending)
            said = b""
            while not said.endswith(_READY) and (part := answer.read(4096)):
                said += part
    sys.stderr.write(said.removesuffix(_READY).decode(errors="replace"))
    if said.endswith(_READY):
        return process.pid
    raise _ended(process.wait(), directory / LOG, begins, told=bool(said))


def _ended(code: int, log: Path, begins: int, *, told: bool) -> SystemExit | EnvironmentUnusableError:
    """Return the error for a scheduler that ended before it could be used."""
    with log.open("rb") as written:
        written.seek(begins)
        text = written.read().decode(errors="replace")
    sys.stderr.write(text)
    if code > 0 and (told or text):
        return SystemExit(code)
    how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
    return EnvironmentUnusableError(
        f"the scheduler ended {how} before it could be used, and {log} does not say why",
        "see whether the disk is full or memory is short; `gpuslice up --foreground` shows more",
    )


class StartupPipe:
    """A pipe to the process that waits until this scheduler can be used; a context manager.

    A gpuslice error that ends the context meanwhile is told to them, and ends the process with its code.

    Parameters
    ----------
    descriptor
        The pipe to the waiting process; ``None`` if that is this terminal.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> StartupPipe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None and isinstance(error, GpusliceError):
            self.tell(error.message)
            if error.remedy:
                self.tell(error.remedy)
            raise SystemExit(error.exit_code) from error

    def tell(self, text: str) -> None:
        """Print a line on stderr, or write it to the process that waits."""
        line = f"gpuslice: {text}\n"
        if self._descriptor is None:
            sys.stderr.write(line)
        else:
            os.write(self._descriptor, line.encode())

    def ready(self) -> None:
        """Let ``start`` return: the scheduler can be used."""
        if self._descriptor is not None:
            os.write(self._descriptor, _READY)
            os.close(self._descriptor)
            self._descriptor = None
