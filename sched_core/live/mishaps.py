"""Decisions of the core that went wrong: rejected events, and decisions that took too long.

Repeated ones are reported, and tried again, ever less often.
"""

from __future__ import annotations

from collections.abc import Callable

from gpuslice.sched_core.back_off import BackOff
from gpuslice.sched_core.lifecycle.events import Event, Noted, Plain, job_of, named

_FIRST_S, _MOST_S = 1.0, 60.0
#: The most rejections that are kept. The oldest is forgotten first.
_MOST = 1000
#: A decision that takes this long is slow: all jobs of the shortest usual quantum would wait for it.
SLOW_S = 1.0
_SLOW_FIRST_S, _SLOW_MOST_S = 10.0, 600.0


class Rejections:
    """The rejected events by kind and job, each with its pause."""

    def __init__(self) -> None:
        self._pauses: dict[tuple[str, str], BackOff] = {}

    def count(self, event: Event, now: float) -> bool:
        """Count the rejection of ``event``. Return True if it is to be reported."""
        key = _key(event)
        pause = self._pauses.setdefault(key, BackOff(_FIRST_S, _MOST_S))
        if pause.pauses(now):
            return False
        pause.failed(now)
        self._pauses[key] = self._pauses.pop(key)
        while len(self._pauses) > _MOST:
            del self._pauses[next(iter(self._pauses))]
        return True

    def again_s(self, event: Event) -> float:
        """Return when an event like ``event`` may be tried again; 0 if the last one was not rejected."""
        pause = self._pauses.get(_key(event))
        return 0.0 if pause is None else pause.until_s

    def accepted(self, event: Event) -> None:
        """Forget former rejections of events like ``event``."""
        if self._pauses:
            self._pauses.pop(_key(event), None)


class SlowDecisions:
    """The reports on events that took the core too long.

    Parameters
    ----------
    policy
        Returns the name of the policy, whose code takes most of that time.
    """

    def __init__(self, policy: Callable[[], str]) -> None:
        self._policy = policy
        self._pause = BackOff(_SLOW_FIRST_S, _SLOW_MOST_S)

    def note(self, event: Event, took_s: float, now: float) -> Noted | None:
        """Return what to report of ``event``. None if ``took_s`` was short, or one was reported lately."""
        if took_s < SLOW_S or self._pause.pauses(now):
            return None
        self._pause.failed(now)
        details: dict[str, Plain] = {
            "policy": self._policy(),
            "event": named(event),
            "took_s": round(took_s, 3),
        }
        return Noted("slow_decision", "", details)


def _key(event: Event) -> tuple[str, str]:
    return named(event), job_of(event)
