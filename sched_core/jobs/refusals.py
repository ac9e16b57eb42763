"""The suspends and the resumes that a job has refused in a row, and when to try each again."""

from __future__ import annotations

import msgspec

from gpuslice.sched_core.back_off import BackOff

#: Seconds before a refused suspend or resume is tried again: the first time, doubled each time, and at most.
_FIRST_S = 0.5
_MOST_S = 60.0


def _back_off() -> BackOff:
    return BackOff(_FIRST_S, _MOST_S)


class Refusals(msgspec.Struct):
    """Refused suspends and refused resumes in a row, each with its pause.

    Attributes
    ----------
    suspend, resume
        How many were refused in a row, and when to try again.
    suspend_error, resume_error
        Why the newest was refused; empty before the first refusal.
    """

    suspend: BackOff = msgspec.field(default_factory=_back_off)
    resume: BackOff = msgspec.field(default_factory=_back_off)
    suspend_error: str = ""
    resume_error: str = ""

    def forget(self) -> None:
        """Reset both counts and pauses: other processes are asked from now on."""
        self.suspend.succeeded()
        self.resume.succeeded()
