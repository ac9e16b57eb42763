"""Jobs that failed and were tried again: what a rule on retries would have spared them.

Source: the Philly study (Jeon et al., ATC 2019, section 4.3): many failures are the user's and come back at
every retry; retrying only what may go well the next time frees their devices.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpuslice.errors import UsageError

from .trace import Attempt, Trace

#: What an attempt that ended well is called in files.
WELL = "ok"


class Spared(msgspec.Struct, frozen=True):
    """The jobs that end earlier because of a rule on retries, and the device time that this saves.

    Attributes
    ----------
    jobs
        Jobs that were not tried as often as in the trace.
    device_s
        Device-seconds that they would have gone on for.
    """

    jobs: int = 0
    device_s: float = 0.0


def parse_attempts(text: str) -> tuple[Attempt, ...]:
    """Parse ``600:user;300:ok``: seconds of each attempt, and the class of failure that ended it.

    Raises
    ------
    ValueError
        If it is not such a list.
    """
    attempts: list[Attempt] = []
    for part in text.split(";"):
        seconds, _, failure = part.strip().partition(":")
        took_s = float(seconds)
        if not 0 <= took_s < float("inf") or not failure:
            raise ValueError(f"{part!r} is not SECONDS:CLASS")
        attempts.append((took_s, "" if failure == WELL else failure))
    return tuple(attempts)


def write_attempts(attempts: tuple[Attempt, ...]) -> str:
    """Return attempts as text that `parse_attempts` reads."""
    return ";".join(f"{exact(took_s)}:{failure or WELL}" for took_s, failure in attempts)


def exact(number: float) -> str:
    """Return ``number`` as text with all its digits; a whole number without a point."""
    return str(int(number)) if number == int(number) else repr(number)


def parse_retries(text: str) -> dict[str, int]:
    """Parse ``user:0,transient:3``: how often a failure of each class is retried.

    Raises
    ------
    UsageError
        If it is not such a list.
    """
    rule: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.partition(":")
        if not name.strip() or not count.strip().isdecimal():
            raise UsageError(
                f"--retries {text}: {part!r} is not CLASS:COUNT", "write e.g. user:0,transient:3"
            )
        rule[name.strip()] = int(count)
    return rule


def retried(trace: Trace, rule: Mapping[str, int]) -> tuple[Trace, Spared]:
    """Return ``trace`` with failures retried as ``rule`` says, and what that saves.

    Classes that ``rule`` does not name stay as they were.

    A job ends for good with the first failure that it does not allow to be retried. The attempts of a job
    follow each other on its devices.

    Raises
    ------
    UsageError
        If the trace says nothing of attempts, or ``rule`` names a class that it does not have.
    """
    if trace.attempts is None:
        raise UsageError(
            f"{trace.name} says nothing of attempts", "give it a column attempts, or leave out --retries"
        )
    known = {failure for attempts in trace.attempts for _, failure in attempts if failure}
    for name in rule:
        if name not in known:
            raise UsageError(
                f"no job of {trace.name} failed as {name!r}",
                f"it has {', '.join(sorted(known)) or 'no failures'}",
            )
    kept = [_kept(attempts, rule) for attempts in trace.attempts]
    duration_s = [
        sum(took_s for took_s, _ in attempts) if len(attempts) < len(before) else whole_s
        for attempts, before, whole_s in zip(kept, trace.attempts, trace.duration_s, strict=True)
    ]
    fewer = [i for i, attempts in enumerate(kept) if len(attempts) < len(trace.attempts[i])]
    spared = sum((trace.duration_s[i] - duration_s[i]) * trace.demand[i] for i in fewer)
    return trace.changed(duration_s=duration_s, attempts=kept), Spared(len(fewer), spared)


def _kept(attempts: tuple[Attempt, ...], rule: Mapping[str, int]) -> tuple[Attempt, ...]:
    left = dict(rule)
    for number, (_, failure) in enumerate(attempts, 1):
        if failure in left:
            left[failure] -= 1
            if left[failure] < 0:
                return attempts[:number]
    return attempts
