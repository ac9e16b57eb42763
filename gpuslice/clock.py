"""The clocks that gpuslice's loops are given, and the start times of processes."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """A source of the time for code that does I/O. The core has no clock: it is given ``now``."""

    def now(self) -> float:
        """Return the seconds since an arbitrary fixed instant. They never decrease."""
        ...


class MonotonicClock:
    """The machine's monotonic clock; immune to steps of the wall clock."""

    def now(self) -> float:
        return time.monotonic()


class BoottimeClock:
    """The machine's clock since it was started, sleep included. All processes read the same time."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class ContinuedClock(MonotonicClock):
    """The machine's monotonic clock, set forward to continue an earlier one after the machine restarted."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def continue_from(self, when_s: float) -> None:
        """Set the clock forward to ``when_s``, unless it is later already."""
        self._ahead_s = max(0.0, when_s - super().now())

    def now(self) -> float:
        return super().now() + self._ahead_s


def process_began(pid: int) -> str:
    """Return when a process began, as the kernel counts it; an empty text if there is no such process."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return status.rpartition(")")[2].split()[19]
    return ""
