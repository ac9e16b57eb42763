"""A trace in memory: columns, one entry per job, in order of submission."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuslice.errors import UsageError
from gpuslice.sched_core.job import JobSpec

from .day import FIELDS

#: Seconds that one attempt at a job took, and the class of the failure that ended it; "" if it went well.
Attempt = tuple[float, str]


class Trace:
    """Jobs with their running times, in order of submission (ties keep the order given).

    Columns are plain lists: the simulator reads single entries, and a million ``JobSpec`` objects at once
    would cost more memory than the simulation itself.

    Parameters
    ----------
    ids, submit_s, demand, duration_s
        One entry per job: name, seconds, devices, seconds on dedicated devices.
    extras
        Further columns by ``JobSpec`` field name.
    name
        Name of the trace's file or origin, for messages and reports.
    attempts
        Per job, the attempts that its duration is made of; ``None`` if the trace says nothing of them. No
        policy sees them.
    left_out
        How many jobs of the file are not in the trace, by cause.
    hold_until_s
        Per job, when its owner has it start at the earliest; 0: at once. ``None``: no job is held.
    """

    def __init__(
        self,
        ids: Sequence[str],
        submit_s: Sequence[float],
        demand: Sequence[int],
        duration_s: Sequence[float],
        extras: Mapping[str, Sequence[Any]] | None = None,
        name: str = "trace",
        attempts: Sequence[tuple[Attempt, ...]] | None = None,
        left_out: Mapping[str, int] | None = None,
        hold_until_s: Sequence[float] | None = None,
    ) -> None:
        self.name = name
        self.left_out = dict(left_out or {})
        order = sorted(range(len(ids)), key=submit_s.__getitem__)
        take: Callable[[Sequence[Any]], list[Any]] = lambda column: [column[i] for i in order]  # noqa: E731
        self.ids: list[str] = take(ids)
        self.submit_s: list[float] = list(map(float, take(submit_s)))
        self.demand: list[int] = take(demand)
        self.duration_s: list[float] = list(map(float, take(duration_s)))
        self.extras: dict[str, list[Any]] = {key: take(column) for key, column in (extras or {}).items()}
        self.attempts = None if attempts is None else take(attempts)
        self.hold_until_s = None if hold_until_s is None else take(hold_until_s)
        if not self.ids:
            left = f": {self.omissions}" if self.left_out else ""
            raise UsageError(f"{name} has no jobs{left}", "a trace needs at least one")
        if len(set(self.ids)) != len(self.ids):
            twice = next(job for job, times in Counter(self.ids).items() if times > 1)
            raise UsageError(f"{name} names job {twice} twice", "give every job an id of its own")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def omissions(self) -> str:
        """Return the counts of jobs left out, by cause, the most frequent first, or an empty text."""
        causes = sorted(self.left_out.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{count:,} left out: {cause}" for cause, count in causes)

    def spec(self, index: int) -> JobSpec:
        """Return what is known of job ``index`` when it is submitted."""
        extras = {key: column[index] for key, column in self.extras.items()}
        return JobSpec(
            id=self.ids[index], submit_s=self.submit_s[index], devices=self.demand[index], **extras
        )

    @property
    def has_conditions(self) -> bool:
        """True if some job waits for a moment, its owner or other jobs, or has a time limit or a priority."""
        columns = (*(self.extras.get(field, ()) for field in FIELDS), self.hold_until_s or ())
        return any(any(column) for column in columns)

    def failed(self, index: int) -> bool:
        """Return True if the last attempt of job ``index`` failed, as far as the trace says."""
        return bool(self.attempts and self.attempts[index] and self.attempts[index][-1][1])

    def clamped(self, devices: int) -> Trace:
        """Return the same jobs, none of them asking for more than ``devices``."""
        extras = dict(self.extras)
        for bound in {"least_devices", "most_devices"} & extras.keys():
            extras[bound] = [min(most, devices) for most in extras[bound]]
        return self.changed(demand=[min(demand, devices) for demand in self.demand], extras=extras)

    def changed(self, **columns: Any) -> Trace:
        """Return the same trace with other ``columns``, named as the arguments of this class."""
        own = ("ids", "submit_s", "demand", "duration_s", "extras", "name", "attempts", "left_out")
        present = {name: getattr(self, name) for name in (*own, "hold_until_s")}
        return Trace(**{**present, **columns})

    def in_units_of(self, unit_s: float) -> Trace:
        """Return the same jobs in seconds, for a trace whose times count units of ``unit_s`` seconds."""
        submit_s = [time_s * unit_s for time_s in self.submit_s]
        duration_s = [time_s * unit_s for time_s in self.duration_s]
        extras = dict(self.extras)
        if "deadlines" in extras:
            extras["deadlines"] = [
                tuple((time_s * unit_s, value) for time_s, value in deadlines)
                for deadlines in extras["deadlines"]
            ]
        for name in {"begin_unix_s", "time_limit_s"} & extras.keys():
            extras[name] = [time_s * unit_s for time_s in extras[name]]
        hold_until_s = self.hold_until_s and [time_s * unit_s for time_s in self.hold_until_s]
        attempts = None
        if self.attempts is not None:
            attempts = [tuple((time_s * unit_s, failure) for time_s, failure in own) for own in self.attempts]
        return self.changed(
            submit_s=submit_s,
            duration_s=duration_s,
            extras=extras,
            attempts=attempts,
            hold_until_s=hold_until_s,
        )

    def check_fits(self, devices: int) -> None:
        """Raise an error if a job is too large to run on ``devices``.

        Raises
        ------
        UsageError
            If a job asks for more than ``devices``.
        """
        for index, demand in enumerate(self.demand):
            if demand > devices:
                raise UsageError(
                    f"job {self.ids[index]} of {self.name} asks for {demand} devices of {devices}",
                    "choose a larger --cluster, or clamp such jobs with --clamp",
                )
