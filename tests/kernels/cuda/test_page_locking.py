"""Page-locking: once per arena, refusals explained, and nothing locked that is gone."""

from __future__ import annotations

import resource

import pytest

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.kernels.cuda.page_locking import ALREADY_REGISTERED, LOCK_BYTES, PageLocks


class Runtime:
    """What the CUDA runtime would remember, and codes that it gives instead."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.locked: dict[int, int] = {}
        self.calls = 0

    def host_register(self, address: int, nbytes: int) -> int:
        self.calls += 1
        if self.codes:
            return self.codes.pop(0)
        if address in self.locked:
            return ALREADY_REGISTERED
        self.locked[address] = nbytes
        return 0

    def host_unregister(self, address: int) -> int:
        return 0 if self.locked.pop(address, None) else 713


def test_a_mapping_is_locked_once_and_unlocked_once() -> None:
    runtime, locks = Runtime(), PageLocks()
    assert locks.take(runtime, 4096, 8192)
    assert locks.take(runtime, 4096, 8192)
    assert (runtime.calls, locks.count) == (1, 1)
    assert locks.problem(4096, 8192) == locks.problem(4096, 100) == ""
    locks.release(runtime, 4096)
    locks.release(runtime, 4096)
    assert runtime.locked == {}
    assert locks.problem(4096, 8192) == "it was never asked for"


def test_a_refusal_is_explained_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    runtime, locks = Runtime(2), PageLocks()
    assert not locks.take(runtime, 4096, 8192)
    assert (
        locks.problem(4096, 8192)
        == "cudaHostRegister of 8192 bytes gave CUDA error 2, ulimit -l allows 65536"
    )
    assert locks.count == 0
    assert locks.take(runtime, 4096, 8192), "it may be asked for again"
    assert locks.problem(4096, 8192) == ""


def test_a_refusal_without_a_limit_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    locks = PageLocks()
    locks.take(Runtime(2), 4096, 8192)
    assert "ulimit" not in locks.problem(4096, 8192)


def test_a_lock_that_outlived_its_mapping_is_renewed() -> None:
    runtime, locks = Runtime(), PageLocks()
    runtime.locked[4096] = 1024
    assert locks.take(runtime, 4096, 8192)
    assert runtime.locked == {4096: 8192}


def test_a_lock_of_somebody_else_is_left_alone() -> None:
    runtime, locks = Runtime(ALREADY_REGISTERED), PageLocks()
    assert not locks.take(runtime, 4096, 8192)
    assert f"CUDA error {ALREADY_REGISTERED}" in locks.problem(4096, 8192)


def test_a_lock_that_cannot_be_undone_is_an_error() -> None:
    runtime, locks = Runtime(), PageLocks()
    locks.take(runtime, 4096, 8192)
    runtime.locked.clear()
    with pytest.raises(EnvironmentUnusableError, match="CUDA error 713"):
        locks.release(runtime, 4096)


def test_a_longer_mapping_than_the_locked_one_is_not_locked() -> None:
    runtime, locks = Runtime(), PageLocks()
    locks.take(runtime, 4096, 8192)
    assert locks.problem(4096, 8193)


PARTS = [(0, LOCK_BYTES), (LOCK_BYTES, LOCK_BYTES), (2 * LOCK_BYTES, 4096)]


def test_a_large_mapping_is_locked_in_parts_that_no_copy_crosses() -> None:
    runtime, locks = Runtime(), PageLocks()
    assert locks.take(runtime, 4096, 2 * LOCK_BYTES + 4096)
    assert runtime.locked == {4096 + at: nbytes for at, nbytes in PARTS}
    assert locks.count == 1
    assert locks.apart(4096, 2 * LOCK_BYTES + 4096) == PARTS
    assert locks.apart(4096 + 10, LOCK_BYTES) == [(0, LOCK_BYTES - 10), (LOCK_BYTES - 10, 10)]
    assert locks.apart(4096 + 10, LOCK_BYTES - 10) == [(0, LOCK_BYTES - 10)]
    assert locks.apart(4096 + LOCK_BYTES, 5) == [(0, 5)]
    assert locks.apart(0, LOCK_BYTES) == [(0, LOCK_BYTES)], "not ours"
    locks.release(runtime, 4096)
    assert runtime.locked == {}


def test_of_a_refused_mapping_no_part_stays_locked() -> None:
    runtime, locks = Runtime(0, 2), PageLocks()
    runtime.locked[4096] = LOCK_BYTES  # by the first of these codes
    assert not locks.take(runtime, 4096, 2 * LOCK_BYTES)
    assert runtime.locked == {}


def test_a_part_that_cannot_be_unlocked_does_not_keep_the_others() -> None:
    runtime, locks = Runtime(), PageLocks()
    assert locks.take(runtime, 4096, 2 * LOCK_BYTES)
    del runtime.locked[4096]
    with pytest.raises(EnvironmentUnusableError, match=r"0x1000 failed with CUDA error 713"):
        locks.release(runtime, 4096)
    assert runtime.locked == {}


def test_what_could_not_be_unlocked_is_unlocked_before_the_next_lock() -> None:
    class Stubborn(Runtime):
        refusals = 1

        def host_unregister(self, address: int) -> int:
            self.refusals -= 1
            return 719 if self.refusals >= 0 else super().host_unregister(address)

    runtime, locks = Stubborn(), PageLocks()
    assert locks.take(runtime, 4096, 8192)
    with pytest.raises(EnvironmentUnusableError, match="719"):
        locks.release(runtime, 4096)
    assert locks.take(runtime, 8192, 8192)
    assert runtime.locked == {8192: 8192}
    assert locks.take(runtime, 65536, 4096)
    assert runtime.locked == {8192: 8192, 65536: 4096}
