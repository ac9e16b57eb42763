"""How long a step takes, measured while a job trains."""

from __future__ import annotations

import msgspec

#: The weight that older steps keep at each suspend.
_MEMORY = 0.5
#: How many steps must follow the first report before a step time is told (Chronus' profiler, SoCC 2021,
#: section 4.1).
ENOUGH = 3


class StepTime(msgspec.Struct):
    """The steps of a job and the time they took. Newer steps count more.

    What came before the first report of a step (building the model, warming up) is no part of it. Between
    that and a suspend, or between two, only the newest report matters: a journal that leaves the others out
    is replayed to the same step time.

    Attributes
    ----------
    step, at_s
        The newest step that was reported, and the time on devices then, in seconds.
    """

    step: int = 0
    at_s: float = 0.0
    _first: int = 0
    _from: tuple[int, float] = (0, 0.0)
    _before: tuple[float, float] = (0.0, 0.0)

    def note(self, step: int, executed_s: float) -> bool:
        """Note that ``step`` steps took ``executed_s`` seconds. Return True if these are the first steps.

        The seconds are those on the devices that the job asks for, or stand for as much work on others.
        """
        first = step > self.step == 0
        if step > self.step:
            self.step, self.at_s = step, executed_s
        if first:
            self._first, self._from = step, (step, executed_s)
        return first

    def suspended(self) -> None:
        """Note that the job is suspended: the steps that follow count more than those so far."""
        steps, seconds = self._measured()
        self._before = (steps * _MEMORY, seconds * _MEMORY)
        self._from = (self.step, self.at_s)

    @property
    def step_s(self) -> float | None:
        """The seconds that a step takes, above 0. None before enough steps were made."""
        steps, seconds = self._measured()
        enough = self.step - self._first >= ENOUGH and min(steps, seconds) > 0
        return seconds / steps if enough else None

    def _measured(self) -> tuple[float, float]:
        (before, before_s), (begun, begun_s) = self._before, self._from
        return before + self.step - begun, before_s + self.at_s - begun_s
