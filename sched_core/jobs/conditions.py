"""What a job waits for before it may start: a moment, and the ends of other jobs."""

from __future__ import annotations

import msgspec

from .states import JobState

#: The states in which the other job may have ended, by what is written behind its id, and how to say that.
_STATES = {
    "ok": ((JobState.SUCCEEDED,), "has succeeded"),
    "failed": ((JobState.FAILED,), "has failed"),
    "any": ((JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED), "has ended"),
}


def followed(dependency: str) -> str:
    """Return the id of the job that ``dependency``, such as ``a:any``, names."""
    return dependency.partition(":")[0]


def allows(dependency: str, state: JobState) -> bool:
    """Return True if ``dependency`` is fulfilled by a job that has ended in ``state``."""
    return state in _STATES[dependency.partition(":")[2] or "ok"][0]


def described(dependency: str) -> str:
    """Return ``dependency`` in words, such as ``a has succeeded``."""
    job, _, how = dependency.partition(":")
    return f"{job} {_STATES[how or 'ok'][1]}"


class Conditions(msgspec.Struct):
    """The conditions of a job's start that are not fulfilled yet. A fulfilled one stays fulfilled.

    Attributes
    ----------
    begin_unix_s
        The moment before which it may not start; 0: none, or it has come.
    after
        The jobs that must have ended, and how: ``a``, ``a:ok``, ``a:any`` or ``a:failed``.
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

    def fulfil(self, dependency: str) -> None:
        """Note that a job that is followed has ended as it must."""
        self.after = tuple(one for one in self.after if one != dependency)
