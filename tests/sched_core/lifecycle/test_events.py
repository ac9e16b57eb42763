"""Events can be written down, or are none: each value within its range."""

from __future__ import annotations

import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import Cancelled, Event, Exited, Submitted, encode
from gpuslice.types import JobId


def submitted(moment_s: float) -> Submitted:
    return Submitted(
        JobSpec(id=JobId("a"), submit_s=moment_s), Program(argv=("true",), directory="/", environ={})
    )


@pytest.mark.parametrize(
    "event",
    [
        Exited("a", -(2**31)),
        Exited("a", 2**31 - 1),
        submitted(0.0),
        submitted(1e12),
        Cancelled("a", "\0é" * 2**15),
    ],
)
def test_what_is_at_the_end_of_its_range_can_be_written_down(event: Event) -> None:
    encode(event)


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (Exited("a", -(2**31) - 1), "code"),
        (Exited("a", 2**31), "code"),
        (Exited("a", 2**64), "Exited"),
        (submitted(-1.0), "submit_s"),
        (submitted(1.1e12), "submit_s"),
        (submitted(float("nan")), "submit_s"),
        (Cancelled("a/b", ""), "job"),
        (Cancelled("a", "a" * (2**16 + 1)), "reason"),
        (Cancelled("a", "\udcff"), "Cancelled"),
    ],
)
def test_what_is_beyond_is_refused_before_it_is_written_down(event: Event, field: str) -> None:
    with pytest.raises(UsageError, match=field):
        encode(event)
