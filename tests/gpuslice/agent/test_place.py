"""When a process asks for its rank's place, and what is taken for something on the device."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gpuslice.agent import place
from gpuslice.agent.place import Place, holds_nothing
from gpuslice.wire import Resume, Withdraw, Withdrawn

from .rank import Rank


@pytest.fixture
def asked() -> Mock:
    return Mock()


@pytest.fixture
def its(rank: Rank, asked: Mock) -> Place:
    made = Place(rank.orders, rank.boundaries, ask=asked, enter=Mock())
    made.device = "cpu:0"
    return made


def enters(its: Place) -> Any:
    return its._enter


def test_a_rank_passes_boundaries_without_asking(rank: Rank, its: Place, asked: Mock) -> None:
    rank.running(boundary=4)
    assert not its.pass_boundary()
    asked.assert_not_called()


def test_a_displaced_process_asks_only_when_it_trains(rank: Rank, its: Place, asked: Mock) -> None:
    rank.running(boundary=0)
    its.lose()
    assert its.pass_boundary()
    asked.assert_not_called()
    rank.boundaries.steps = 1
    asked.side_effect = lambda: rank.orders.resume(Resume(epoch=5, device="cpu:0"))
    assert its.pass_boundary()
    enters(its).assert_called_once_with(Resume(epoch=5, device="cpu:0"))


def test_a_child_whose_lease_is_elsewhere_is_suspended_for_it(rank: Rank, its: Place) -> None:
    rank.boundaries.count = 3
    its.ask_as_child()
    rank.orders.resume(Resume(epoch=5, device="cpu:1"))
    assert not its.pass_boundary()
    assert rank.orders.arrive(3)
    assert rank.orders.await_order() == Resume(epoch=5, device="cpu:1")


def test_a_child_that_is_rejected_runs_on(rank: Rank, its: Place) -> None:
    rank.boundaries.count = 3
    its.ask_as_child()
    rank.orders.release()
    assert its.pass_boundary()
    enters(its).assert_not_called()


def test_cuda_begins_only_with_a_lease_after_the_place_was_given_up(
    rank: Rank, its: Place, asked: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = Mock()
    monkeypatch.setattr(torch._C, "_cuda_init", began, raising=False)
    monkeypatch.setattr(place, "holds_nothing", lambda: True)
    rank.running(epoch=1, boundary=0)
    assert its.withdraw(Withdraw(epoch=1)) == [Withdrawn(epoch=1)]
    asked.side_effect = lambda: rank.orders.resume(Resume(epoch=5, device="cpu:0"))
    enters(its).side_effect = lambda order: began.assert_not_called()
    torch._C._cuda_init()
    asked.assert_called_once_with()
    enters(its).assert_called_once_with(Resume(epoch=5, device="cpu:0"))
    began.assert_called_once_with()


def test_a_tensor_of_the_script_is_something_on_the_device() -> None:
    kept = torch.ones(3)
    assert not holds_nothing()
    del kept
