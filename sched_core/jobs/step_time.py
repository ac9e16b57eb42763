"""How long a step takes, measured while a job trains."""

from __future__ import annotations

import msgspec

#: How much of what was measured before its last suspend is kept when a job is suspended again.
_MEMORY = 0.5
#: So many steps, after the first that were reported, tell how long one takes (Chronus' profiler, SoCC 2021,
#: section 4.1).
ENOUGH = 3


class StepTime(msgspec.Struct):
    """Steps and the time they took, newer ones counting more.

    What came before the first report of a step (building the model, warming up) is no part of it. Between
    that and a suspend, or between two, only the newest report matters: a journal that leaves the others out
    is replayed to the same step time.

    Attributes
    ----------
    step, at_s
        The newest report that told of a new step, and the time on devices then, in seconds.
    """

    step: int = 0
    at_s: float = 0.0
    _first: int = 0
    _from: tuple[int, float] = (0, 0.0)
    _before: tuple[float, float] = (0.0, 0.0)

    def note(self, step: int, executed_s: float) -> bool:
        """Take in that ``step`` steps took ``executed_s`` seconds on the devices that the job asks for, or
        as much work on others; whether that is the first.
        """
        first = step > self.step == 0
        if step > self.step:
            self.step, self.at_s = step, executed_s
        if first:
            self._first, self._from = step, (step, executed_s)
        return first

    def suspended(self) -> None:
        """Whatever comes now counts more than what was so far."""
        steps, seconds = self._measured()
        self._before = (steps * _MEMORY, seconds * _MEMORY)
        self._from = (self.step, self.at_s)

    @property
    def step_s(self) -> float | None:
        """Seconds that a step takes, above 0; ``None`` before enough were made."""
        steps, seconds = self._measured()
        enough = self.step - self._first >= ENOUGH and min(steps, seconds) > 0
        return seconds / steps if enough else None

    def _measured(self) -> tuple[float, float]:
        (before, before_s), (begun, begun_s) = self._before, self._from
        return before + self.step - begun, before_s + self.at_s - begun_s
