"""Messages between a recorded job and its observer while it runs, in a few bytes of shared memory.

The job writes how many intervals it has recorded. The observer writes that the job must end at its next
boundary, or that it is another job's turn. This costs less than a microsecond per boundary. Only a job whose
turn is over has to wait: for a byte in a pipe.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

_INTERVALS, _STOP, _AWAY, _SUSPENDED = 0, 1, 2, 3
_WORDS, _WORD_BYTES = 4, 8


class StepControl:
    """A channel between a measured job and its observer: shared counters, and a pipe for turns.

    Parameters
    ----------
    path
        A file of four such words.
    turns
        The descriptor of the pipe's open end; -1 without a pipe.
    """

    def __init__(self, path: Path, turns: int = -1) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _WORDS * _WORD_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._turns = turns

    @classmethod
    def create(cls, recording: Path, *, takes_turns: bool = False) -> StepControl:
        """Return a new control for the job that will record into ``recording``."""
        path = _path(recording)
        path.write_bytes(bytes(_WORDS * _WORD_BYTES))
        if not takes_turns:
            return cls(path)
        os.mkfifo(_turns_path(recording), 0o600)
        # Both ends: opening does not wait for the job. The job reads end-of-file when this process is gone.
        return cls(path, os.open(_turns_path(recording), os.O_RDWR | os.O_CLOEXEC))

    @classmethod
    def beside(cls, recording: Path) -> StepControl | None:
        """Return the job's end of the channel; None if no process observes the job."""
        path = _path(recording)
        return cls(path) if path.exists() else None

    @classmethod
    def of_turns(cls, recording: Path) -> StepControl | None:
        """Return the job's end of the channel if the job takes turns with others; else None."""
        pipe = _turns_path(recording)
        if not pipe.exists():
            return None
        return cls(_path(recording), os.open(pipe, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Close the pipe. A job that waits for its turn goes on, and ends at its next boundary."""
        if self._turns >= 0:
            os.close(self._turns)
            self._turns = -1

    @property
    def intervals(self) -> int:
        """Number of intervals that the job has recorded."""
        return self._words[_INTERVALS]

    def passed(self, intervals: int) -> bool:
        """Report that the job has recorded ``intervals`` intervals. Return True if the job must end."""
        self._words[_INTERVALS] = intervals
        return self._words[_STOP] != 0

    def stop(self) -> None:
        """Make the job end at its next boundary."""
        self._words[_STOP] = 1

    @property
    def away(self) -> bool:
        """True if it is another job's turn."""
        return self._words[_AWAY] != 0

    @property
    def suspended(self) -> bool:
        """True if the job is suspended."""
        return self._words[_SUSPENDED] != 0

    def withdraw(self) -> None:
        """End the job's turn at its next boundary."""
        self._words[_AWAY] = 1

    def grant(self) -> None:
        """Give the turn to the job, which is suspended."""
        if self.away:
            self._words[_AWAY] = self._words[_SUSPENDED] = 0
            os.write(self._turns, b"1")

    def await_turn(self) -> None:
        """Record that the job is suspended, and wait for its turn, or until the observer is gone."""
        self._words[_SUSPENDED] = 1
        if not os.read(self._turns, 1):
            self.stop()
            self._words[_AWAY] = self._words[_SUSPENDED] = 0


def _path(recording: Path) -> Path:
    return recording.with_name(f"{recording.name}.control")


def _turns_path(recording: Path) -> Path:
    return recording.with_name(f"{recording.name}.turns")
