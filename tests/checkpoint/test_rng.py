"""Shared generators: captured, put back, and stored in a tree."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from gpuslice.checkpoint import rng
from gpuslice.errors import RefusedSnapshotError


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.random(), np.random.normal(), float(torch.rand(1))]


def test_the_same_numbers_come_again() -> None:
    draw()  # leaves half of a Gaussian pair behind in each library
    states = rng.capture()
    first = draw()
    rng.restore(states)
    assert draw() == first


def test_a_captured_state_does_not_change_with_its_generator() -> None:
    states = rng.capture()
    first = draw()
    draw()
    rng.restore(states)
    assert draw() == first


@pytest.mark.parametrize("damage", [{"random": 3}, {"numpy": ("MT19937",)}, {"torch": torch.zeros(3)}])
def test_what_is_not_a_state_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(RefusedSnapshotError):
        rng.restore(rng.capture() | damage)


def test_states_of_missing_gpus_are_refused() -> None:
    states = rng.capture() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 99}
    with pytest.raises(RefusedSnapshotError, match="99 GPUs"):
        rng.restore(states)


def test_another_process_leaves_out_the_gpus_that_it_does_not_see() -> None:
    states = rng.capture() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 99}
    first = draw()
    rng.restore(states, {})
    assert draw() == first
