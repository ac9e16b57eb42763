"""The rank's side of a lease: fencing, stopping, overshooting."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from gpuslice.agent import orders
from gpuslice.agent.orders import Phase
from gpuslice.errors import UsageError
from gpuslice.runtime.boundaries import NEVER
from gpuslice.runtime.ending import ENDING_SIGNALS
from gpuslice.wire import (
    Dismiss,
    Overshot,
    Resume,
    Suspend,
    Withdraw,
    Withdrawn,
)

from .rank import Rank, on_leave

#: Where an order says to stop that takes back the one before.
CALLED_OFF = 2**62


def test_the_first_lease_ends_the_waiting(rank: Rank) -> None:
    assert rank.orders.phase is Phase.WAITING
    rank.orders.resume(Resume(epoch=3, device="cpu:1"))
    assert rank.orders.await_order() == Resume(epoch=3, device="cpu:1")
    assert rank.orders.epoch == 3


def test_a_suspend_ahead_sets_the_boundary_to_stop_at(rank: Rank) -> None:
    rank.running(boundary=5)
    assert rank.orders.suspend(Suspend(epoch=1, stop_at=7)) == []
    assert rank.boundaries.stop_at == 7
    assert not rank.orders.arrive(6)
    assert rank.orders.arrive(7)
    assert rank.orders.phase is Phase.PARKED
    assert rank.boundaries.stop_at == NEVER


@pytest.mark.parametrize("boundary", [7, 8, 100])
def test_a_suspend_at_or_behind_the_present_boundary_is_overshot(rank: Rank, boundary: int) -> None:
    rank.running(boundary=boundary)
    assert rank.orders.suspend(Suspend(epoch=1, stop_at=7)) == [Overshot(epoch=1, boundary=boundary)]
    assert rank.boundaries.stop_at == NEVER
    assert not rank.orders.arrive(boundary)


def test_a_larger_stop_at_replaces_the_first(rank: Rank) -> None:
    rank.running(boundary=5)
    rank.orders.suspend(Suspend(epoch=1, stop_at=7))
    rank.orders.suspend(Suspend(epoch=1, stop_at=9))
    assert rank.boundaries.stop_at == 9


def test_a_boundary_that_cannot_be_parked_at_is_overshot_once(rank: Rank) -> None:
    rank.running(boundary=5)
    rank.orders.suspend(Suspend(epoch=1, stop_at=7))
    assert rank.orders.pass_by(6) == []
    assert rank.orders.pass_by(7) == [Overshot(epoch=1, boundary=7)]
    assert rank.boundaries.stop_at == NEVER
    assert rank.orders.pass_by(8) == []
    rank.orders.suspend(Suspend(epoch=1, stop_at=9))
    assert rank.orders.arrive(9)


def test_who_only_listens_for_a_boundary_overshoots_none(rank: Rank) -> None:
    rank.running(boundary=0).orders.listen()
    assert rank.orders.pass_by(1) == []
    assert not rank.orders.arrive(1)


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_suspend_of_another_epoch_changes_nothing(rank: Rank, epoch: int) -> None:
    rank.running(epoch=2, boundary=5)
    assert rank.orders.suspend(Suspend(epoch=epoch, stop_at=7)) == []
    assert rank.boundaries.stop_at == NEVER


def test_a_stale_lease_does_not_wake_a_parked_rank(rank: Rank) -> None:
    rank.parked(epoch=2, boundary=4)
    rank.orders.resume(Resume(epoch=1, device="cpu:0"))
    rank.orders.resume(Resume(epoch=3, device="cpu:1"))
    assert rank.orders.await_order() == Resume(epoch=3, device="cpu:1")


def test_a_parked_rank_goes_on_to_a_larger_stop_at_under_the_same_lease(rank: Rank) -> None:
    rank.parked(boundary=4)
    rank.orders.resume(Resume(epoch=1, device="cpu"))
    rank.orders.suspend(Suspend(epoch=1, stop_at=6))  # before the main thread has run on
    assert isinstance(rank.orders.await_order(), Resume)
    rank.orders.run_on()
    assert rank.boundaries.stop_at == 6


def test_a_lease_sent_twice_does_not_end_the_next_stay(rank: Rank) -> None:
    rank.parked(boundary=4)
    rank.orders.resume(Resume(epoch=2, device="cpu:0"))
    rank.orders.await_order()
    rank.orders.resume(Resume(epoch=2, device="cpu:0"))
    rank.orders.run_on()
    rank.orders.suspend(Suspend(epoch=2, stop_at=6))
    rank.boundaries.count = 6
    assert rank.orders.arrive(6)
    rank.orders.resume(Resume(epoch=3, device="cpu:1"))
    assert rank.orders.await_order() == Resume(epoch=3, device="cpu:1")


def test_a_rank_that_waits_is_dismissed(rank: Rank) -> None:
    rank.orders.dismiss(Dismiss(epoch=4))
    assert rank.orders.await_order() == Dismiss(epoch=4)
    parked = Rank().parked(epoch=3, boundary=4)
    parked.orders.dismiss(Dismiss(epoch=2))
    assert not parked.orders.called
    parked.orders.dismiss(Dismiss(epoch=5))
    assert parked.orders.await_order() == Dismiss(epoch=5)


def test_a_rank_that_runs_is_not_dismissed(rank: Rank) -> None:
    rank.running(boundary=3)
    rank.orders.dismiss(Dismiss(epoch=9))
    assert not rank.orders.called


@pytest.mark.parametrize("signum", sorted(ENDING_SIGNALS))
def test_a_signal_that_asks_to_end_interrupts_the_stay(rank: Rank, signum: int) -> None:
    rank.parked(boundary=4)
    rank.orders.interrupt(signum)
    assert rank.orders.await_order() is None


def test_a_signal_between_the_look_and_the_wait_is_not_lost(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.parked(boundary=3)
    wait = rank.orders._await_news

    def late(most_ms: float) -> None:
        rank.orders._asked_to_end = True  # as if its handler ran just before, and woke nobody
        assert most_ms < 10_000, "nobody would ever wake it"
        wait(most_ms)

    monkeypatch.setattr(rank.orders, "_await_news", late)
    assert rank.orders.await_order() is None


def test_a_signal_interrupts_a_wait_that_has_begun(rank: Rank) -> None:
    """From the wait itself, as a signal's handler would: it runs in the main thread."""
    rank.parked(boundary=4)
    before = signal.signal(signal.SIGTERM, lambda signum, frame: rank.orders.interrupt(signum))
    try:
        sender = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGTERM))
        sender.start()
        assert rank.orders.await_order() is None
        sender.join()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_signals_wait_for_the_lease(rank: Rank) -> None:
    rank.parked(boundary=4)
    rank.orders.interrupt(signal.SIGUSR1)
    rank.orders.resume(Resume(epoch=2, device="cpu:0"))
    assert rank.orders.await_order() == Resume(epoch=2, device="cpu:0")


def test_a_job_on_leave_parks_at_the_very_next_boundary(rank: Rank) -> None:
    on_leave(rank, 4)
    assert rank.boundaries.stop_at <= 5
    assert rank.orders.arrive(5)
    assert rank.orders.phase is Phase.PARKED
    assert rank.boundaries.stop_at == NEVER


def test_orders_to_a_job_on_leave_hold_from_its_next_boundary_on(rank: Rank) -> None:
    on_leave(rank, 4)
    rank.orders.resume(Resume(epoch=2, device="cpu:1"))
    assert rank.orders.suspend(Suspend(epoch=2, stop_at=9)) == []
    assert rank.boundaries.stop_at <= 5
    rank.boundaries.count = 5
    assert rank.orders.arrive(5)
    assert rank.orders.await_order() == Resume(epoch=2, device="cpu:1")
    rank.orders.run_on()
    assert rank.boundaries.stop_at == 9


def test_a_stop_that_a_job_on_leave_has_reached_comes_one_later(rank: Rank) -> None:
    on_leave(rank, 4)
    rank.orders.resume(Resume(epoch=2, device="cpu:1"))
    rank.orders.suspend(Suspend(epoch=2, stop_at=5))
    rank.boundaries.count = 5
    assert rank.orders.arrive(5)
    assert isinstance(rank.orders.await_order(), Resume)
    assert rank.boundaries.stop_at == 6


def test_a_job_that_is_told_to_end_runs_on(rank: Rank) -> None:
    """The script's handler sets a flag, which its loop looks at some boundaries later."""
    on_leave(rank, 4)
    rank.orders.suspend(Suspend(epoch=1, stop_at=CALLED_OFF, ending=True))
    assert not any(rank.orders.arrive(boundary) for boundary in (5, 6))


@pytest.fixture
def handles_the_end() -> Iterator[None]:
    """The script has a handler for SIGTERM."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, before)


def parked_and_told_to_end(rank: Rank) -> None:
    rank.running(boundary=4)
    rank.orders.suspend(Suspend(epoch=1, stop_at=5))
    assert rank.orders.arrive(5)
    rank.orders.suspend(Suspend(epoch=1, stop_at=CALLED_OFF, ending=True))


@pytest.mark.usefixtures("handles_the_end")
def test_a_job_that_parked_behind_its_handler_comes_back(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "HANDLER_S", 0.01)
    parked_and_told_to_end(rank)
    assert rank.orders.await_order() is None
    rank.orders.take_leave()
    assert not rank.orders.arrive(6)


@pytest.mark.usefixtures("handles_the_end")
def test_a_parked_job_that_is_told_to_end_waits_for_the_signal(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a gang that come back before it would end at different batches."""
    monkeypatch.setattr(orders, "HANDLER_S", 1e9)
    parked_and_told_to_end(rank)
    assert not rank.orders.called
    rank.orders.interrupt(signal.SIGTERM)
    assert rank.orders.await_order() is None


def test_where_a_former_lease_was_to_end_is_forgotten_with_it(rank: Rank) -> None:
    rank.parked(boundary=4)
    rank.orders.suspend(Suspend(epoch=1, stop_at=9))  # it was called off and told again meanwhile
    assert rank.boundaries.stop_at == 9
    rank.orders.resume(Resume(epoch=2, device="cpu:0"))
    assert rank.boundaries.stop_at == NEVER


def test_the_first_boundary_can_be_heard_of_without_parking(rank: Rank) -> None:
    rank.running(boundary=0).orders.listen()
    assert rank.boundaries.stop_at == 1
    rank.boundaries.count = 1
    assert not rank.orders.arrive(1)
    assert (rank.orders.phase, rank.boundaries.stop_at) == (Phase.RUNNING, NEVER)
    assert rank.orders.suspend(Suspend(epoch=1, stop_at=2)) == []
    assert rank.orders.arrive(2)


@pytest.mark.parametrize("first", [True, False])
def test_an_order_to_stop_goes_before_listening(rank: Rank, *, first: bool) -> None:
    rank.running(boundary=0)
    if not first:
        rank.orders.listen()
    rank.orders.suspend(Suspend(epoch=1, stop_at=1))
    if first:
        rank.orders.listen()
    assert rank.orders.arrive(1)


def test_quiet_is_no_order_for_so_long(rank: Rank) -> None:
    assert rank.orders.quiet_for(0.01)
    rank.orders.resume(Resume(epoch=1, device="cpu"))
    assert not rank.orders.quiet_for(60.0)
    assert rank.orders.await_order() == Resume(epoch=1, device="cpu"), "it was only looked at"


def test_the_end_of_a_job_ends_the_quiet(rank: Rank) -> None:
    rank.orders.dismiss(Dismiss(epoch=0))
    assert not rank.orders.quiet_for(60.0)


def test_a_process_that_trains_without_a_lease_goes_on_with_one_of_its_device(rank: Rank) -> None:
    rank.running(boundary=5).orders.take_leave()
    rank.orders.resume(Resume(epoch=2, device="cpu:0"))
    rank.orders.suspend(Suspend(epoch=2, stop_at=9))
    assert rank.orders.lease_on("cpu:1") is None
    assert rank.orders.lease_on("cpu:0") == Resume(epoch=2, device="cpu:0")
    assert (rank.orders.phase, rank.boundaries.stop_at) == (Phase.RUNNING, 9)


def test_a_displaced_process_comes_by_at_every_boundary_and_has_no_lease(rank: Rank) -> None:
    rank.running(epoch=4, boundary=5).orders.displace()
    assert (rank.orders.epoch, rank.boundaries.stop_at) == (0, 0)
    assert rank.orders.arrive(6)
    rank.orders.resume(Resume(epoch=7, device="cpu:0"))
    assert rank.orders.await_order() == Resume(epoch=7, device="cpu:0")


def test_a_process_that_gets_no_place_runs_on_wherever_it_hears_of_that(rank: Rank) -> None:
    rank.running(boundary=5).orders.take_leave()
    rank.orders.release()
    assert (rank.orders.phase, rank.boundaries.stop_at) == (Phase.RUNNING, NEVER)


def test_a_parked_process_that_gets_no_place_comes_back_for_good(rank: Rank) -> None:
    rank.running(boundary=5).orders.take_leave()
    assert rank.orders.arrive(6)
    rank.orders.release()
    assert rank.orders.await_order() is None
    rank.orders.take_leave()
    assert (rank.orders.phase, rank.boundaries.stop_at) == (Phase.RUNNING, NEVER)


def test_a_process_whose_first_words_are_rejected_ends_with_the_reason(rank: Rank) -> None:
    rank.orders.refuse(UsageError("no such rank"))
    with pytest.raises(UsageError, match="no such rank"):
        rank.orders.await_order()


def test_a_process_that_has_passed_no_boundary_gives_its_place_up(rank: Rank) -> None:
    rank.running(epoch=2, boundary=0).orders.listen()
    assert rank.orders.withdraw(Withdraw(epoch=1), lambda: True) == []
    assert rank.orders.withdraw(Withdraw(epoch=2), lambda: False) == []
    assert rank.boundaries.stop_at == 1
    assert rank.orders.withdraw(Withdraw(epoch=2), lambda: True) == [Withdrawn(epoch=2)]
    assert rank.orders.displaced
    assert rank.orders.phase is Phase.ON_LEAVE


def test_a_process_that_trains_keeps_its_place(rank: Rank) -> None:
    rank.running(epoch=2, boundary=3)
    assert rank.orders.withdraw(Withdraw(epoch=2), lambda: True) == []
    assert (rank.boundaries.stop_at, rank.orders.displaced) == (NEVER, False)
