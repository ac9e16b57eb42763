"""What the policy wants computed, as the core sees it: asked of the shell, and answered by an event."""

from __future__ import annotations

from collections.abc import Callable

from gpuslice.sched_core.policy import Task, TaskError

from .events import Compute, Computed


class Computations:
    """Gives the shell one task at a time, and its answer to the policy.

    Equal tasks are the same task. An answer is there for the plan that follows its arrival, and no longer.

    Parameters
    ----------
    order
        Asks the shell.
    """

    def __init__(self, order: Callable[[Compute], object]) -> None:
        self._order = order
        self._number = 0
        self._asked: Compute | None = None
        self._answered: tuple[Task, Computed] | None = None

    @property
    def unanswered(self) -> Compute | None:
        """What the shell was asked for and has not answered yet."""
        return self._asked

    def compute(self, task: Task) -> bytes | None:
        """The answer, or ``None`` if it is not there yet; see ``View.compute``."""
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
        """Let the policy have an answer; whether that was waited for."""
        if self._asked is None or self._asked.number != computed.number:
            return False
        self._answered, self._asked = (self._asked.task, computed), None
        return True

    def forget(self) -> None:
        """The policy has had its chance to look at the answer."""
        self._answered = None
