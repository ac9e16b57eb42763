"""The report of a job under ``gpuslice run``: a JSON file, rewritten at every switch (docs/json.md).

A command may train several times. Each of its processes keeps what the others have written. The ``launch``
in the file tells it from the report of another ``gpuslice run``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import msgspec
import torch

from gpuslice.checkpoint.switch.record import SwitchRecord
from gpuslice.config import format_size
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.files import replace_file
from gpuslice.runtime.ending import say
from gpuslice.version import __version__

#: Totals that are no sums: the mean follows from other totals, and the maximum is the largest one.
_MEAN, _MOST = "blackout_mean_s", "blackout_max_s"
#: Longer reports are not read.
_MOST_BYTES = 1 << 28


class _Training(msgspec.Struct, frozen=True):
    """The report of one process. Its totals say how many of the switches are its own."""

    process: int
    totals: dict[str, int | float]


class _Written(msgspec.Struct, frozen=True):
    """A report as it is in the file."""

    launch: str
    trainings: list[_Training]
    switches: list[msgspec.Raw]


class Report:
    """The run report of one rank: collects its switches and keeps the file up to date.

    Parameters
    ----------
    path
        The file; None to keep totals only.
    job, rank
        The job and the rank that the report is of.
    launch
        The ``gpuslice run`` that this process belongs to. If empty, there are no other processes.

    Raises
    ------
    EnvironmentUnusableError
        If the file cannot be written.
    """

    def __init__(self, path: Path | None, *, job: str = "", rank: int = 0, launch: str = "") -> None:
        self._path = path
        self.job = job
        self._rank = rank
        self._launch = launch
        #: The trainings of other processes of the launch, with their switches.
        self._others: list[tuple[_Training, list[bytes]]] = []
        self._rows: list[bytes] = []
        #: For each switch its blackout in seconds, and True if its suspend was cold.
        self._blackouts: list[tuple[float, bool]] = []
        self._bytes_copied = 0
        self._checkpoints = 0
        self._checkpoint_bytes = 0
        self._checkpoint_blocked_s = 0.0
        self._stale = False
        self._written: tuple[int, int] | None = None
        self.write(boundaries=0, steps=0)

    def set_rank(self, rank: int, path: Path | None) -> None:
        """Report as ``rank``, to the file ``path``, from now on."""
        if rank != self._rank:
            self._rank, self._path, self._written = rank, path, None

    def add(self, record: SwitchRecord) -> None:
        """Append a finished switch. `write` puts it into the file."""
        self._rows.append(msgspec.json.encode(record.as_dict()))
        self._blackouts.append((record.blackout_s, record.cold))
        self._bytes_copied += record.bytes_copied

    def checkpointed(self, nbytes: int, blocked_s: float) -> None:
        """Count a published checkpoint of ``nbytes``, for which the training waited ``blocked_s``."""
        self._checkpoints += 1
        self._checkpoint_bytes += nbytes
        self._checkpoint_blocked_s += blocked_s

    def totals(self, *, boundaries: int, steps: int) -> dict[str, float]:
        """Return the report's ``totals``."""
        blackouts_s = [seconds for seconds, _ in self._blackouts]
        cold_s = [seconds for seconds, cold in self._blackouts if cold]
        return {
            "boundaries": boundaries,
            "steps": steps,
            "switches": len(blackouts_s),
            "bytes_copied": self._bytes_copied,
            "blackout_s": sum(blackouts_s),
            "blackout_mean_s": sum(blackouts_s) / len(blackouts_s) if blackouts_s else 0.0,
            "blackout_max_s": max(blackouts_s, default=0.0),
            "cold": len(cold_s),
            "blackout_cold_s": sum(cold_s),
            "checkpoints": self._checkpoints,
            "checkpoint_bytes": self._checkpoint_bytes,
            "checkpoint_blocked_s": self._checkpoint_blocked_s,
        }

    def summary(self, *, boundaries: int, steps: int) -> str:
        """Return the totals in one line for the user."""
        totals = self.totals(boundaries=boundaries, steps=steps)
        switches = int(totals["switches"])
        if not switches:
            return f"no switch at {boundaries} boundaries, {steps} optimizer steps"
        copied = format_size(int(totals["bytes_copied"] / switches))
        mean_ms = totals["blackout_mean_s"] * 1e3
        return (
            f"{switches} switch{'' if switches == 1 else 'es'} at {boundaries} boundaries, {copied} "
            f"copied and {mean_ms:.1f} ms of blackout each on average"
        )

    def update(self, *, boundaries: int, steps: int) -> None:
        """Write the report. If that fails, print so once, and let the training go on."""
        try:
            self.write(boundaries=boundaries, steps=steps)
            self._stale = False
        except EnvironmentUnusableError as error:
            if not self._stale:
                say(error.message, "the training goes on")
            self._stale = True

    def write(self, *, boundaries: int, steps: int) -> None:
        """Replace the file by the present report, atomically. What other processes trained stays in it."""
        if self._path is None:
            return
        if self._is_others():
            others = self._read_others()
            if others is None or not boundaries:
                return  # a launcher, whose rank writes the file now, or a process that does not train
            self._others = others
        elif self._written is None:
            self._others = self._read_others() or []
        versions = {
            "gpuslice": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        }
        own = _Training(os.getpid(), self.totals(boundaries=boundaries, steps=steps))
        trained = list(self._others)
        if boundaries or not trained:
            trained.append((own, self._rows))
        rows = b",\n".join(row for _, rows in trained for row in rows)
        trainings = [training for training, _ in trained]
        parts = {
            "job": self.job,
            "rank": self._rank,
            "totals": _sum([training.totals for training in trainings]),
            "trainings": trainings,
            "launch": self._launch,
            "versions": versions,
        }
        lines = [b'"%s": %s' % (key.encode(), msgspec.json.encode(value)) for key, value in parts.items()]
        # One line per switch; rows are encoded once, so that a drill of many switches stays cheap.
        lines.insert(2, b'"switches": [\n%s\n]' % rows)
        try:
            self._written = _stamp(replace_file(self._path, b"{\n%s\n}\n" % b",\n".join(lines)))
        except OSError as error:
            raise EnvironmentUnusableError(
                f"cannot write the report {self._path}: {error.strerror}", "choose another --report file"
            ) from error

    def _read_others(self) -> list[tuple[_Training, list[bytes]]] | None:
        """Return what other processes of this launch have trained; None if the file is not of this launch."""
        assert self._path is not None
        try:
            if not self._launch or self._path.stat().st_size > _MOST_BYTES:
                return None
            found = msgspec.json.decode(self._path.read_bytes(), type=_Written)
        except (OSError, ValueError, RecursionError):
            return None  # nobody has written one, or it is something else
        if found.launch != self._launch:
            return None
        others, rows = list[tuple[_Training, list[bytes]]](), iter(found.switches)
        for training in found.trainings:
            its_rows = [bytes(row) for row in islice(rows, int(training.totals.get("switches", 0)))]
            is_mine = self._written is not None and training.process == os.getpid()
            if training.totals.get("boundaries") and not is_mine:
                others.append((training, its_rows))
        return others

    def _is_others(self) -> bool:
        """Return True if another process has written this file since this one has."""
        assert self._path is not None
        if self._written is None:
            return False
        try:
            return _stamp(self._path.stat()) != self._written
        except FileNotFoundError:
            return False


def _sum(totals: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the totals of all trainings added up."""
    found = {name: sum(one.get(name, 0) for one in totals) for name in totals[-1]}
    found[_MOST] = max(one.get(_MOST, 0.0) for one in totals)
    found[_MEAN] = found["blackout_s"] / found["switches"] if found["switches"] else 0.0
    return found


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns
