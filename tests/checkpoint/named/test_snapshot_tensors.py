"""How a snapshot's tensors get into live ones."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from gpuslice.checkpoint.named.snapshot_tensors import copy_bits

CORES = 3
LARGE, SMALL = 1 << 18, 16


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many threads torch is given, one after the other; a rank of torchrun's has one."""
    before, found = torch.get_num_threads(), list[int]()
    torch.set_num_threads(1)
    give = torch.set_num_threads

    def noted(threads: int) -> None:
        found.append(threads)
        give(threads)

    monkeypatch.setattr(torch, "set_num_threads", noted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(CORES)))
    yield found
    give(before)


def test_large_tensors_are_copied_by_several_cores_small_ones_by_the_scripts_own(asked: list[int]) -> None:
    for count, threads in ((LARGE, [CORES, 1]), (SMALL, [])):
        source, live = torch.arange(float(count)), torch.zeros(count)
        copy_bits(live, source)
        assert torch.equal(live, source)
        assert asked == threads
        asked.clear()


def test_a_copy_that_fails_leaves_the_scripts_number_of_threads(asked: list[int]) -> None:
    with pytest.raises(RuntimeError):
        copy_bits(torch.zeros(LARGE), torch.zeros(LARGE - 1))
    assert (asked, torch.get_num_threads()) == ([CORES, 1], 1)


def test_a_script_with_as_many_threads_is_left_alone(asked: list[int]) -> None:
    torch.set_num_threads(CORES)
    asked.clear()
    copy_bits(torch.zeros(LARGE), torch.ones(LARGE))
    assert asked == []
