"""Copies past the caches: every byte, and no other; without a compiler the ordinary way, and saying so."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.kernels import copying, uncached
from gpuslice.kernels.host import view_address

NBYTES = uncached.SMALLEST_BYTES


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    uncached.load.cache_clear()
    yield
    uncached.load.cache_clear()


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 127, 128, 4096, 100_003])
@pytest.mark.parametrize(("target_at", "source_at"), [(0, 0), (1, 0), (0, 1), (63, 17), (16, 48)])
def test_any_range_to_any_place(nbytes: int, target_at: int, source_at: int) -> None:
    move, problem = uncached.load()
    if move is None:
        pytest.skip(problem)
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 64, np.uint8)
    target = np.zeros(nbytes + 192, np.uint8)
    skew = -view_address(memoryview(target)) % 64 + target_at
    move(target.ctypes.data + skew, source.ctypes.data + source_at, nbytes)
    assert np.array_equal(target[skew : skew + nbytes], source[source_at : source_at + nbytes])
    assert not target[:skew].any()
    assert not target[skew + nbytes :].any()


@pytest.fixture
def large() -> tuple[copying.Pairs, memoryview]:
    data = torch.arange(NBYTES // 8).untyped_storage()
    return [(data, 4096)], memoryview(bytearray(NBYTES + 8192))


def test_large_copies_go_past_the_caches(
    large: tuple[copying.Pairs, memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []

    def move(target: int, source: int, nbytes: int) -> None:
        moved.append(nbytes)
        ctypes.memmove(target, source, nbytes)

    monkeypatch.setattr(uncached, "load", lambda: (move, ""))
    pairs, arena = large
    assert copying.copy_out(pairs, arena, None, 2).fallbacks == ()
    assert sum(moved) == NBYTES
    small = torch.ones(NBYTES - 1, dtype=torch.uint8).untyped_storage()
    copying.copy_out([(small, 0)], arena, None, 2)
    assert sum(moved) == NBYTES


def test_without_a_compiler_it_says_so(
    large: tuple[copying.Pairs, memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(source: object) -> None:
        raise EnvironmentUnusableError("there is no C compiler here", "install gcc, or set CC")

    monkeypatch.setattr(uncached, "shared_library", none)
    pairs, arena = large
    transfer = copying.copy_out(pairs, arena, None, 2)
    assert transfer.fallbacks == (
        "copies go through the caches: there is no C compiler here (install gcc, or set CC)",
    )
    assert np.array_equal(np.frombuffer(arena, np.int64, NBYTES // 8, 4096), np.arange(NBYTES // 8))
