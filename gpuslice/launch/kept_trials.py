"""The trials that an experiment has completed, kept in a file until the experiment is complete."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.files import private_directory
from gpuslice.profiler.colocation.trial import Trial

_VERSION = 3


class KeptTrials:
    """The kept trials, one line of JSON each; a context manager that locks the file.

    Parameters
    ----------
    path
        The file. It is made if it does not exist.

    Raises
    ------
    UsageError
        If the same experiment runs already.
    EnvironmentUnusableError
        If the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("a+b")
        except OSError as error:
            raise EnvironmentUnusableError(f"cannot open {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.trials = self._load()
        except BlockingIOError as error:
            self._file.close()
            raise UsageError("the same experiment is running already", "wait for it, or stop it") from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> KeptTrials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, trial: Trial) -> None:
        """Append ``trial`` to the list and to the file."""
        self.trials.append(trial)
        self._file.write(msgspec.json.encode(trial) + b"\n")
        self._file.flush()

    def forget(self) -> None:
        """Remove the file, once the experiment is complete and reported."""
        self.path.unlink(missing_ok=True)

    def _load(self) -> list[Trial]:
        self._file.seek(0)
        data = self._file.read()
        # A process that was killed may have left half a line.
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        try:
            return [msgspec.json.decode(line, type=Trial) for line in whole.splitlines()]
        except msgspec.DecodeError as error:
            raise EnvironmentUnusableError(
                f"{self.path} is damaged: {error}", "remove it; the experiment begins anew"
            ) from error


def kept_path(state: Path, commands: Sequence[Sequence[str]], device: str, numbers: Sequence[object]) -> Path:
    """Return the path of an experiment's file. It depends on scripts, folder, device and ``numbers``.

    The number of rounds does not matter: a longer experiment continues a shorter one.
    """
    option = "GPUSLICE_STATE_DIR"
    private_directory(state, option=option, parents=True, by_link=True)
    directory = state / "colocate"
    private_directory(directory, option=option)
    contents = [[_digest(Path(word)) for word in words] for words in commands]
    what = [_VERSION, str(Path.cwd()), commands, contents, device, numbers]
    return directory / f"{hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:24]}.jsonl"


def _digest(path: Path) -> str:
    """Return the checksum of a file that a command line names; "" if the word is no file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    except OSError:
        return ""
