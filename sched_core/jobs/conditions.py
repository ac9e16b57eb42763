"""What a job waits for before it may start: a moment, and the ends of other jobs."""

from __future__ import annotations

from collections.abc import Set

import msgspec

from .states import JobState

#: What a dependency waits for by what is written behind the id: of a job, and of all jobs of an array.
_WORDS = {
    "ok": ("{} has succeeded", "all jobs of {} have succeeded"),
    "failed": ("{} has failed", "all jobs of {} have ended and one has failed"),
    "any": ("{} has ended", "all jobs of {} have ended"),
}


def followed(dependency: str) -> str:
    """Return the id of the job or the array that ``dependency``, such as ``a:any``, names."""
    return dependency.partition(":")[0]


def allows(dependency: str, state: JobState) -> bool:
    """Return True if ``dependency`` is fulfilled by a job that has ended in ``state``."""
    return bool(fulfilled(dependency, {state}, over=True))


def fulfilled(dependency: str, ended: Set[JobState], *, over: bool) -> bool | None:
    """Return True if ``dependency`` is fulfilled, False if it can never be. Return None if it still can be.

    Parameters
    ----------
    ended
        The states of those of the jobs that have ended: of one job, or of an array's.
    over
        True if all of them have ended.
    """
    how = dependency.partition(":")[2] or "ok"
    if how == "ok" and ended - {JobState.SUCCEEDED}:
        return False
    if not over:
        return None
    return how != "failed" or JobState.FAILED in ended


def described(dependency: str, *, array: bool = False) -> str:
    """Return ``dependency`` in words, such as ``a has succeeded``, or as it is said of an array."""
    name, _, how = dependency.partition(":")
    return _WORDS[how or "ok"][array].format(name)


class Conditions(msgspec.Struct):
    """The conditions of a job's start that are not fulfilled yet. A fulfilled one stays fulfilled.

    Attributes
    ----------
    begin_unix_s
        The moment before which it may not start; 0: none, or it has come.
    after
        The jobs or arrays that must have ended, and how: ``a``, ``a:ok``, ``a:any`` or ``a:failed``.
    """

    begin_unix_s: float = 0.0
    after: tuple[str, ...] = ()

    @property
    def unmet(self) -> bool:
        """True if the job may not start yet."""
        return self.begin_unix_s > 0.0 or bool(self.after)

    def come(self) -> None:
        """Note that the moment has come."""
        self.begin_unix_s = 0.0

    def waive(self) -> None:
        """Note that its owner wants it started whatever was stated before."""
        self.begin_unix_s, self.after = 0.0, ()

    def failed(self, dependency: str) -> None:
        """Note that a job of an array has failed: if that was waited for, the others have only to end.

        So a scheduler that takes the job over need not know of jobs that have ended before.
        """
        if dependency.endswith(":failed"):
            ends = f"{followed(dependency)}:any"
            self.after = tuple(ends if one == dependency else one for one in self.after)

    def fulfil(self, dependency: str) -> None:
        """Note that a job that is followed has ended as it must."""
        self.after = tuple(one for one in self.after if one != dependency)
