"""Shared generators: captured, put back, and stored in a tree."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.named import process_rng
from gpuslice.checkpoint.named.state import check
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import RefusedSnapshotError
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

from ..harness import digest


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.random(), np.random.normal(), float(torch.rand(1))]


def test_the_same_numbers_come_again() -> None:
    draw()  # leaves half of a Gaussian pair behind in each library
    states = process_rng.capture()
    first = draw()
    process_rng.restore(states)
    assert draw() == first


def test_a_captured_state_does_not_change_with_its_generator() -> None:
    states = process_rng.capture()
    first = draw()
    draw()
    process_rng.restore(states)
    assert draw() == first


def test_states_as_they_were_saved_at_first_are_put_back() -> None:
    draw()
    states = process_rng.capture()
    kind, keys, *rest = np.random.get_state(legacy=True)
    first = draw()
    states |= {"numpy": (kind, torch.from_numpy(keys), *rest)}
    process_rng.check(states, {})
    process_rng.restore(states)
    assert draw() == first


@pytest.fixture(params=["MT19937", "PCG64", "Philox", "SFC64"])
def numpy_generator(request: pytest.FixtureRequest) -> Iterator[str]:
    """What ``np.random`` draws from meanwhile."""
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(getattr(np.random, request.param)(7))
    yield request.param
    np.random.set_bit_generator(own)


def test_numpy_may_have_been_given_another_generator(numpy_generator: str, tmp_path: Path) -> None:
    with RamDisk(tmp_path / "ramdisk", 1 << 24).open_store("mine") as store:
        switch = Switch(open_device(DeviceName("cpu", None)), store)
        switch.suspend(boundary=1, named={"random": process_rng.capture()}, restartable=True)
        first = draw()
        switch.resume()
        assert draw() == first
        assert switch.snapshot is not None
        with open_snapshot(switch.snapshot.path) as snapshot:
            states = check(snapshot, {"random": None}).value("random")
    process_rng.check(states, {})
    process_rng.restore(states)
    assert draw() == first


def test_a_state_of_another_generator_of_numpys_is_refused(numpy_generator: str) -> None:
    states = process_rng.capture()
    np.random.set_bit_generator(np.random.PCG64DXSM(7))
    with pytest.raises(RefusedSnapshotError, match="no numpy legacy PCG64DXSM state"):
        process_rng.check(states, {})


@pytest.mark.parametrize(
    "damage",
    [
        *({"random": 3}, {"numpy": ("MT19937",)}, {"torch": torch.zeros(3)}, {"cuda": 1}),
        *({"random": (3, (2**40,) * 625, None)}, {"random": (3, (1,) * 624 + (625,), None)}),
        {"numpy": ("MT19937", torch.zeros(3), 1, 0, 0.0)},
    ],
    ids=str,
)
def test_what_is_not_a_state_is_refused(damage: dict[str, object]) -> None:
    states, before = process_rng.capture() | damage, digest(process_rng.capture())
    with pytest.raises(RefusedSnapshotError):
        process_rng.check(states, {})
    assert digest(process_rng.capture()) == before


@pytest.mark.parametrize("states", [None, 3, {}, {"random": None}])
def test_what_are_no_states_at_all_is_refused(states: object) -> None:
    with pytest.raises(RefusedSnapshotError, match="the process's random states"):
        process_rng.check(states, {})


@pytest.mark.parametrize("library", ["random", "numpy", "torch"])
def test_a_state_that_its_library_takes_but_cannot_go_on_from_is_refused(library: str) -> None:
    words = torch.get_rng_state()
    # The next word is the last one, and two are left.
    words[8:24] = torch.tensor([3, 0, 0, 0, 1, 0, 0, 0, 111, 2, 0, 0, 0, 0, 0, 0])
    forged = {
        "random": (3, (0,) * 625, None),
        "numpy": ("MT19937", torch.ones(624, dtype=torch.uint32), 625, 0, 0.0),
        "torch": words,
    }
    with pytest.raises(RefusedSnapshotError, match="the process was saved with an impossible"):
        process_rng.check(process_rng.capture() | {library: forged[library]}, {})


def test_another_process_leaves_out_the_gpus_that_it_does_not_see() -> None:
    states = process_rng.capture() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 99}
    first = draw()
    process_rng.check(states, {})
    process_rng.restore(states, {})
    assert draw() == first
