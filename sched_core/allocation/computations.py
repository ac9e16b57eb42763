"""The computations that the policy asks for: ordered from the shell, and answered by an event."""

from __future__ import annotations

from collections.abc import Callable

from gpuslice.sched_core.lifecycle.events import Compute, Computed
from gpuslice.sched_core.policy import Task, TaskError


class Computations:
    """The computations of the policy: one task at a time goes to the shell, and its answer to the policy.

    Equal tasks are the same task. An answer is kept for the plan that follows its arrival, and no longer.

    Parameters
    ----------
    order
        The function that orders a computation from the shell.
    """

    def __init__(self, order: Callable[[Compute], object]) -> None:
        self._order = order
        self._number = 0
        self._asked: Compute | None = None
        self._answered: tuple[Task, Computed] | None = None

    @property
    def unanswered(self) -> Compute | None:
        """The order to the shell that has no answer yet. None if there is none."""
        return self._asked

    def compute(self, task: Task) -> bytes | None:
        """Return the answer to ``task``. None if there is none yet; see ``View.compute``."""
        if self._answered is not None and self._answered[0] == task:
            answer = self._answered[1]
            if answer.error:
                raise TaskError(answer.error)
            return answer.answer
        if self._asked is None:
            self._number += 1
            self._asked = Compute(self._number, task)
            self._order(self._asked)
        return None

    def take(self, computed: Computed) -> bool:
        """Keep an answer for the policy. Return True if it answers the task that was ordered last."""
        if self._asked is None or self._asked.number != computed.number:
            return False
        self._answered, self._asked = (self._asked.task, computed), None
        return True

    def forget(self) -> None:
        """Drop the answer, which the policy has had its chance to read."""
        self._answered = None
