"""Reports on decisions that take so long that ranks and clients wait for them, with the policy's name."""

from __future__ import annotations

from gpuslice.sched_core.back_off import BackOff
from gpuslice.sched_core.lifecycle.events import Event, Noted, named

#: A decision that takes this long is slow: all jobs of the shortest usual quantum would wait for it.
SLOW_S = 1.0
_FIRST_S, _MOST_S = 10.0, 600.0


class SlowDecisions:
    """The reports on events that took the core too long.

    Parameters
    ----------
    policy
        The name of the policy, whose code takes most of that time.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._pause = BackOff(_FIRST_S, _MOST_S)

    def note(self, event: Event, took_s: float, now: float) -> Noted | None:
        """Return what to report of ``event``. None if ``took_s`` was short, or one was reported lately."""
        if took_s < SLOW_S or self._pause.pauses(now):
            return None
        self._pause.failed(now)
        return Noted(
            "slow_decision", "", {"policy": self._policy, "event": named(event), "took_s": round(took_s, 3)}
        )
