"""Storages in columns: each once, in a given order, and which of them share memory."""

from __future__ import annotations

import pytest
import torch

from gpuslice.checkpoint.columns import Storages


def storages(*numbers: int) -> Storages:
    """Of as many bytes as their numbers say, which are their keys, too; one behind the other."""
    made = [torch.UntypedStorage(number) for number in numbers]  # type: ignore[no-untyped-call]
    addresses = [sum(numbers[:position]) for position in range(len(numbers))]
    return Storages(made, list(numbers), list(numbers), addresses, list(map(str, numbers)))


@pytest.mark.parametrize("turns", [[], [0], [1, 0], [2, 0, 1]])
def test_all_columns_come_in_turns(turns: list[int]) -> None:
    found = storages(3, 5, 8)
    turned = found.in_turns(turns)
    assert turned.storages == [found.storages[turn] for turn in turns]
    assert turned.keys == turned.sizes == [found.keys[turn] for turn in turns]
    assert turned.addresses == [found.addresses[turn] for turn in turns]
    assert turned.labels == [found.labels[turn] for turn in turns]


def test_each_is_there_once_where_it_came_first() -> None:
    assert storages(7, 4, 7, 9, 4).once().keys == [7, 4, 9]


def test_those_that_share_memory_are_fixed() -> None:
    found = storages(7, 4, 9)
    found.fix_overlapping()
    assert found.fixed == set()
    found.addresses[2] -= 1
    found.fix_overlapping()
    assert found.fixed == {4, 9}
