"""Looking at an arena behind what is done meanwhile: every byte, by any thread, and never afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from gpuslice.kernels import sums
from gpuslice.kernels.looking import Look

#: Thousands of small chunks, and some large ones.
SIZES = [256] * 2000 + [1 << 20] * 8 + [4096] * 100


@pytest.fixture(params=["c", "python"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "python":
        monkeypatch.setattr(sums, "load", lambda: (None, "not here"))
    elif sums.load()[0] is None:
        pytest.skip(sums.load()[1])
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpuslice-look")]


class Written:
    """An arena, and an inspector that expects what is in it."""

    def __init__(self) -> None:
        ends = np.cumsum(SIZES)
        self.memory = memoryview(bytearray(np.random.default_rng(1).bytes(int(ends[-1]))))
        chunks = np.stack([ends - SIZES, ends], axis=1)
        lows = [xxh3_64_intdigest(self.memory[start:end]) for start, end in chunks.tolist()]
        self.expected = sums.Expected(chunks, np.array(lows, np.uint64), LookupError)

    def __call__(self, offset: int, data: memoryview) -> bool:
        row = int(np.searchsorted(self.expected.chunks[:, 0], offset))
        if xxh3_64_intdigest(data) != int(self.expected.lows[row]):
            raise self.expected.damaged(offset)
        return True


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("row", [0, 1, 999, 2000, 2007, -1])
def test_a_damaged_chunk_is_found_wherever_it_is(threads: int, row: int) -> None:
    written = Written()
    start, end = written.expected.chunks[row].tolist()
    for byte in (start, end - 1):
        written.memory[byte] ^= 1
        with Look(written.memory, written, threads) as look, pytest.raises(LookupError) as caught:
            look.finish()
        assert caught.value.args == (start,)
        written.memory[byte] ^= 1
    with Look(written.memory.toreadonly(), written, threads) as look:
        look.finish()


def test_one_of_several_damaged_chunks_is_named() -> None:
    written = Written()
    wrong = written.expected.chunks[::100, 0].tolist()
    for byte in wrong:
        written.memory[byte] ^= 1
    with Look(written.memory, written, 3) as look, pytest.raises(LookupError) as caught:
        look.finish()
    assert caught.value.args[0] in wrong


def test_whoever_leaves_early_is_told_nothing_and_nobody_looks_any_more() -> None:
    written = Written()
    written.memory[-1] ^= 1
    with pytest.raises(ZeroDivisionError), Look(written.memory, written, 3):
        raise ZeroDivisionError


def test_an_arena_that_is_too_short_is_refused() -> None:
    written = Written()
    with pytest.raises(ValueError, match="there are checksums up to byte"):
        Look(written.memory[:-1], written, 2)
