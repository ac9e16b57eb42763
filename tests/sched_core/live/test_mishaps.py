"""Which rejections are told of: fewer and fewer of those that repeat."""

from __future__ import annotations

from gpuslice.sched_core.lifecycle.events import Cancelled, Held, Woken
from gpuslice.sched_core.live.mishaps import Rejections


def test_repeated_rejections_are_told_of_after_pauses_that_double() -> None:
    rejections = Rejections()
    told = [now for now in range(200) if rejections.count(Woken(), float(now))]
    assert told == [0, 1, 3, 7, 15, 31, 63, 123, 183]


def test_each_kind_of_event_and_each_job_has_its_own_pause() -> None:
    rejections = Rejections()
    assert rejections.count(Held("a"), 0.0)
    assert rejections.count(Held("b"), 0.0)
    assert rejections.count(Cancelled("a", ""), 0.0)
    assert not rejections.count(Held("a"), 0.5)
    assert rejections.again_s(Held("a")) == 1.0
    assert rejections.again_s(Held("c")) == 0.0


def test_success_ends_the_pause() -> None:
    rejections = Rejections()
    rejections.count(Held("a"), 0.0)
    rejections.accepted(Held("a"))
    assert rejections.again_s(Held("a")) == 0.0
    assert rejections.count(Held("a"), 0.1)
    assert rejections.again_s(Held("a")) == 1.1


def test_what_was_rejected_longest_ago_is_forgotten() -> None:
    rejections = Rejections()
    for number in range(1001):
        rejections.count(Held(f"job-{number}"), 0.0)
    assert rejections.again_s(Held("job-0")) == 0.0
    assert rejections.again_s(Held("job-1")) == 1.0
