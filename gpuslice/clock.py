"""Time as an argument: the clocks of whatever runs. And when processes began."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """What the shells need of time. The core never sees a clock: it is told ``now``."""

    def now(self) -> float:
        """Seconds since an arbitrary fixed instant; never goes backwards."""
        ...


class MonotonicClock:
    """The machine's monotonic clock; immune to steps of the wall clock."""

    def now(self) -> float:
        return time.monotonic()


class BoottimeClock:
    """Seconds since this machine was started, also those in which it slept; the same in all its processes."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class ContinuedClock(MonotonicClock):
    """The machine's monotonic clock, never before a given moment: it may have started anew since."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def continue_from(self, when_s: float) -> None:
        """Go on from ``when_s``, unless that is past already."""
        self._ahead_s = max(0.0, when_s - super().now())

    def now(self) -> float:
        return super().now() + self._ahead_s


def process_began(pid: int) -> str:
    """When a process began, as the kernel counts it; empty if there is none."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return status.rpartition(")")[2].split()[19]
    return ""
