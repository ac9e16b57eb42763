"""Generators that are saved and set, at every place of their words, and never to an impossible state.

The impossible ones here are such as their libraries take; no test draws from them.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gpuslice.checkpoint.named.generators import Generator, check_generator_state, generator_state
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import RefusedSnapshotError

from ..harness import digest
from ..named_state import module_bits, reload

KINDS: dict[str, Callable[[int], Generator]] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "random": random.Random,
    "legacy": np.random.RandomState,
    "legacy PCG64": lambda seed: np.random.RandomState(np.random.PCG64(seed)),
} | {
    name: lambda seed, name=name: np.random.Generator(getattr(np.random, name)(seed))  # type: ignore[misc]
    for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
}


def draw(generator: Generator, numbers: int) -> list[float]:
    """As many, each of one word where the generator has words of 32 bits."""
    if isinstance(generator, torch.Generator):
        return torch.rand(numbers, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.getrandbits(32) for _ in range(numbers)]
    return generator.bytes(4 * numbers) and list(generator.bytes(4 * numbers))


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_goes_on_wherever_it_was(store: JobStore, kind: str) -> None:
    ours, other = KINDS[kind](1), KINDS[kind](2)
    for numbers in (0, 1, 3, 619, 1, 1, 300):  # up to the last words, beyond them, and in between
        draw(ours, numbers)
        reload(store, {"g": ours}, {"g": other})
        assert digest(generator_state(other)) == digest(generator_state(ours))
    assert draw(other, 700) == draw(ours, 700)


def torch_words(left: int, following: int, *, zero: bool = False) -> torch.Generator:
    """``left`` words before new ones are mixed, of which the next is number ``following``."""
    generator = torch.Generator()
    state = bytearray(generator.get_state().numpy().tobytes())
    struct.pack_into("=iiQ", state, 8, left, 1, following)
    if zero:
        state[24 : 24 + 8 * 624] = bytes(8 * 624)
    generator.set_state(torch.frombuffer(state, dtype=torch.uint8).clone())
    return generator


def numpy_with(name: str, change: Callable[[Any], object], *, legacy: bool = False) -> Generator:
    bits = getattr(np.random, name)(1)
    state = bits.state
    change(state)
    bits.state = state
    return np.random.RandomState(bits) if legacy else np.random.Generator(bits)


def python_zero() -> random.Random:
    generator = random.Random()
    generator.setstate((3, (2**31 - 1, *[0] * 623, 624), None))
    return generator


IMPOSSIBLE: dict[str, Callable[[], Generator]] = {
    "torch: one too far": lambda: torch_words(3, 623),
    "torch: all of them, and again": lambda: torch_words(624, 624),
    "torch: zero": lambda: torch_words(1, 0, zero=True),
    "random: zero": python_zero,
    "MT19937: one too far": lambda: numpy_with("MT19937", lambda s: s["state"].update(pos=625)),
    "MT19937: far": lambda: numpy_with("MT19937", lambda s: s["state"].update(pos=10**6)),
    "MT19937: before": lambda: numpy_with("MT19937", lambda s: s["state"].update(pos=-1)),
    "MT19937: zero": lambda: numpy_with("MT19937", lambda s: s["state"]["key"].fill(0)),
    "legacy: one too far": lambda: numpy_with("MT19937", lambda s: s["state"].update(pos=625), legacy=True),
    "Philox: before": lambda: numpy_with("Philox", lambda s: s.update(buffer_pos=-1)),
    "PCG64: stands still": lambda: numpy_with("PCG64", lambda s: s["state"].update(state=0, inc=0)),
    "PCG64DXSM: stands still": lambda: numpy_with("PCG64DXSM", lambda s: s["state"].update(inc=4)),
    "legacy PCG64: slow": lambda: numpy_with("PCG64", lambda s: s["state"].update(inc=4), legacy=True),
}


@pytest.mark.parametrize("forged", IMPOSSIBLE)
def test_what_its_library_takes_but_cannot_go_on_from_is_refused(store: JobStore, forged: str) -> None:
    """With the right checksums, and before anything has changed."""
    generator = IMPOSSIBLE[forged]()
    live = KINDS[forged.split(":")[0]](5)
    model = nn.Linear(3, 3)
    before = module_bits(model), digest(generator_state(live))
    with pytest.raises(RefusedSnapshotError, match=r"g\[0\] was saved with an impossible "):
        reload(store, {"first": nn.Linear(3, 3), "g": [generator]}, {"first": model, "g": [live]})
    assert (module_bits(model), digest(generator_state(live))) == before


def misfits() -> list[tuple[str, Any]]:
    """Kinds, and what they do not take."""
    mersenne, pcg = (generator_state(KINDS[kind](1))[1] for kind in ("MT19937", "PCG64"))
    words = random.Random(1).getstate()[1]
    return [
        *[(kind, state) for kind in KINDS for state in (None, 3, "state", (), {}, torch.zeros(3))],
        ("torch", torch.zeros(5056, dtype=torch.uint8)),
        ("torch", torch_words(1, 0).get_state().view(torch.int64)),
        ("MT19937", mersenne | {"state": {"key": np.zeros(3, np.uint32), "pos": 1}}),
        ("MT19937", mersenne | {"state": {"key": mersenne["state"]["key"], "pos": 2**40}}),
        ("MT19937", pcg),
        ("legacy", ("MT19937", mersenne["state"]["key"])),
        ("PCG64", pcg | {"state": {"state": -1, "inc": 1}}),
        ("PCG64", pcg | {"uinteger": 2**40}),
        ("random", (3, (*words[:-1], 625), None)),
        ("random", (3, (*words[:-1], -1), None)),
        ("random", (3, (2**70, *words[1:]), None)),
    ]


@pytest.mark.parametrize(("kind", "state"), misfits(), ids=str)
def test_what_its_library_does_not_take_is_refused(kind: str, state: Any) -> None:
    live = KINDS[kind](5)
    before = digest(generator_state(live))
    with pytest.raises(RefusedSnapshotError, match="g was saved with no "):
        check_generator_state(live, state, "g")
    assert digest(generator_state(live)) == before


def test_a_kind_that_we_do_not_know_knows_its_own_states() -> None:
    class Named(random.Random):
        def __init__(self, name: str) -> None:
            super().__init__(name)

    check_generator_state(Named("a"), ("whatever", 1), "g")
