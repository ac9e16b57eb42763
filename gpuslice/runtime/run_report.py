"""The report of a job under ``gpuslice run``: a JSON file, rewritten at every switch (docs/report.md)."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec
import torch

from gpuslice.checkpoint.switch.record import SwitchRecord
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.files import replace_file
from gpuslice.runtime.ending import say
from gpuslice.version import __version__


class Report:
    """Collects the switches of one rank and keeps the file up to date.

    Parameters
    ----------
    path
        The file, or ``None`` to keep totals only.
    job, rank
        Whose it is.

    Raises
    ------
    EnvironmentUnusableError
        If the file cannot be written.
    """

    def __init__(self, path: Path | None, *, job: str = "", rank: int = 0) -> None:
        self._path = path
        self.job = job
        self._rank = rank
        self._rows: list[bytes] = []
        #: What each switch cost, and whether its suspend was cold.
        self._blackouts: list[tuple[float, bool]] = []
        self._bytes_copied = 0
        self._checkpoints = 0
        self._checkpoint_bytes = 0
        self._checkpoint_blocked_s = 0.0
        self._stale = False
        self._written: tuple[int, int] | None = None
        self.write(boundaries=0, steps=0)

    def set_rank(self, rank: int, path: Path | None) -> None:
        """Report as this rank, to its own file, from now on."""
        if rank != self._rank:
            self._rank, self._path, self._written = rank, path, None

    def add(self, record: SwitchRecord) -> None:
        """Append a switch, which is over; `write` makes it visible."""
        self._rows.append(msgspec.json.encode(record.as_dict()))
        self._blackouts.append((record.blackout_s, record.cold))
        self._bytes_copied += record.bytes_copied

    def checkpointed(self, nbytes: int, blocked_s: float) -> None:
        """Count a published checkpoint for which the training waited so long."""
        self._checkpoints += 1
        self._checkpoint_bytes += nbytes
        self._checkpoint_blocked_s += blocked_s

    def totals(self, *, boundaries: int, steps: int) -> dict[str, float]:
        """The report's ``totals``."""
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
        """The totals in one line for a person."""
        totals = self.totals(boundaries=boundaries, steps=steps)
        switches = int(totals["switches"])
        if not switches:
            return f"no switch at {boundaries} boundaries, {steps} optimizer steps"
        mean_mb = totals["bytes_copied"] / switches / 1e6
        mean_ms = totals["blackout_mean_s"] * 1e3
        return (
            f"{switches} switch{'' if switches == 1 else 'es'} at {boundaries} boundaries, {mean_mb:.1f} MB "
            f"copied and {mean_ms:.1f} ms of blackout each on average"
        )

    def update(self, *, boundaries: int, steps: int) -> None:
        """`write`, and if that is not possible any more, say so once: no training ends for it."""
        try:
            self.write(boundaries=boundaries, steps=steps)
            self._stale = False
        except EnvironmentUnusableError as error:
            if not self._stale:
                say(error.message, "the training goes on")
            self._stale = True

    def write(self, *, boundaries: int, steps: int) -> None:
        """Replace the file by the present state, atomically."""
        if self._path is None or self._is_others():
            return
        versions = {
            "gpuslice": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        }
        rows = b",\n".join(self._rows)
        totals = self.totals(boundaries=boundaries, steps=steps)
        parts = {"job": self.job, "rank": self._rank, "totals": totals, "versions": versions}
        lines = [b'"%s": %s' % (key.encode(), msgspec.json.encode(value)) for key, value in parts.items()]
        # One line per switch; rows are encoded once, so that a drill of many switches stays cheap.
        lines.insert(2, b'"switches": [\n%s\n]' % rows)
        try:
            self._written = _stamp(replace_file(self._path, b"{\n%s\n}\n" % b",\n".join(lines)))
        except OSError as error:
            raise EnvironmentUnusableError(
                f"cannot write the report {self._path}: {error.strerror}", "choose another --report file"
            ) from error

    def _is_others(self) -> bool:
        """Whether another process writes this file now: one that this one started is its job's rank."""
        assert self._path is not None
        if self._written is None:
            return False
        try:
            return _stamp(self._path.stat()) != self._written
        except FileNotFoundError:
            return False


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns
