"""A parked rank is told which device it gets next, and from whom: it is handed over without a round trip."""

from __future__ import annotations

import pytest

from gpuslice.runtime.boundaries import NEVER
from gpuslice.wire import Declined, Expect, Forget, FromAgent, Resume, Successor, Suspend

from .rank import Rank, on_leave

EXPECTED = Expect(epoch=2, device="cpu:0", predecessor="other")


def test_something_to_expect_ends_the_quiet(rank: Rank) -> None:
    rank.parked(boundary=3)
    rank.orders.expect(EXPECTED)
    assert not rank.orders.quiet_for(60.0)


def declined(answers: list[FromAgent]) -> list[int]:
    return [answer.epoch for answer in answers if isinstance(answer, Declined)]


def test_whoever_comes_to_what_it_expects_runs_under_that_epoch(rank: Rank) -> None:
    rank.parked(boundary=4)
    assert rank.orders.expect(EXPECTED) == []
    assert not rank.orders.wait(None), "there is something to expect now"
    assert rank.orders.come(EXPECTED)
    assert rank.orders.forget(Forget(epoch=2)) == [], "too late"
    rank.orders.run_on()
    assert (rank.orders.epoch, rank.orders.expected) == (2, None)
    rank.orders.resume(Resume(epoch=2, device="cpu:0"))
    rank.orders.suspend(Suspend(epoch=2, stop_at=6))
    rank.boundaries.count = 6
    assert rank.orders.arrive(6)
    assert not rank.orders.called, "that Resume was for the stay before"


def test_whoever_has_declined_does_not_come(rank: Rank) -> None:
    rank.parked(boundary=4)
    rank.orders.expect(EXPECTED)
    assert declined(rank.orders.forget(Forget(epoch=2))) == [2]
    assert not rank.orders.come(EXPECTED)
    assert declined(rank.orders.expect(EXPECTED)) == [2]
    assert rank.orders.decline("nothing is expected") == []
    rank.orders.resume(Resume(epoch=3, device="cpu:0"))
    assert rank.orders.await_order() == Resume(epoch=3, device="cpu:0")


@pytest.mark.parametrize("state", ["waiting", "running", "on leave"])
def test_only_who_is_parked_expects_anything(rank: Rank, state: str) -> None:
    if state == "running":
        rank.running()
    elif state == "on leave":
        on_leave(rank, 4)
    assert declined(rank.orders.expect(EXPECTED)) == [2]


def test_an_order_goes_before_a_device_that_is_handed_over(rank: Rank) -> None:
    rank.parked(boundary=4)
    rank.orders.expect(EXPECTED)
    rank.orders.resume(Resume(epoch=2, device="cpu:0"))
    assert not rank.orders.come(EXPECTED)
    assert not rank.orders.wait(EXPECTED)
    assert rank.orders.await_order() == Resume(epoch=2, device="cpu:0")
    assert rank.orders.expected is None


def test_a_resume_during_the_handover_is_not_lost_if_that_fails(rank: Rank) -> None:
    rank.parked(boundary=4)
    rank.orders.expect(EXPECTED)
    assert rank.orders.come(EXPECTED)
    rank.orders.resume(Resume(epoch=2, device="cpu:0"))
    assert declined(rank.orders.decline("no room")) == [2]
    assert rank.orders.await_order() == Resume(epoch=2, device="cpu:0")


def test_the_successor_is_that_of_the_newest_order(rank: Rank) -> None:
    rank.running(boundary=3)
    rank.orders.suspend(Suspend(epoch=1, stop_at=5, successor=Successor(job="other", epoch=4)))
    assert rank.orders.successor == Successor(job="other", epoch=4)
    rank.orders.suspend(Suspend(epoch=1, stop_at=NEVER))
    assert rank.orders.successor is None
