"""Large storages are taken in a thread of their own: together, wholly, and given back wholly."""

from __future__ import annotations

import _thread
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from gpuslice.kernels import apart, malloc

MIB = 1 << 20

#: In a process of its own: where memory comes from depends on all that was allocated before.
TOGETHER = """
import torch
from gpuslice.kernels import apart, malloc
from gpuslice.kernels.cpu import CpuDevice
from gpuslice.kernels.host import resident_anonymous_bytes
from gpuslice.types import DeviceName
if not malloc.may_set():
    raise SystemExit("another C library")
device = CpuDevice(DeviceName("cpu", None))
tensors, between = [], []
for _ in range(40):
    tensors.append(torch.ones(3 << 18))
    between.append(bytearray(3000))
storages = [tensor.untyped_storage() for tensor in tensors]
sizes = [(storage, storage.nbytes()) for storage in storages]
nbytes = sum(size for _, size in sizes)
for _ in range(3):
    device.free(storages)
    device.release_caches()
    parked = resident_anonymous_bytes()
    device.reserve(sizes)
    for tensor in tensors:
        tensor.fill_(1)
    heaps = {storage.data_ptr() // apart.HEAP_BYTES for storage in storages}
    others = {id(one) // apart.HEAP_BYTES for one in between}
    print(len(heaps), len(heaps & others), (resident_anonymous_bytes() - parked) / nbytes)
"""

#: Whether heaps are given back whole, whatever other threads do with the small pieces that they come by.
WHOLE = """
import threading
import torch
from gpuslice.kernels import apart, malloc
from gpuslice.kernels.cpu import CpuDevice
from gpuslice.types import DeviceName
if not malloc.may_set():
    raise SystemExit("another C library")

def mapped(heaps):
    spans = (line.split()[:2] for line in open("/proc/self/maps"))
    starts = (int(span.partition("-")[0], 16) for span, access in spans if access == "rw-p")
    return len(heaps & {start // apart.HEAP_BYTES for start in starts})

def linger():
    [malloc.take(nbytes) for nbytes in range(16, 600, 8) for _ in range(40)]
    forever.wait()

device, forever = CpuDevice(DeviceName("cpu", None)), threading.Event()
sizes = [(3 << 20) + 4096 * number + 16 for number in range(80)]
arena = memoryview(bytearray(sum(sizes)))
storages = [torch.UntypedStorage(0, device="cpu") for _ in sizes]
wanted = [(one, size, sum(sizes[:number])) for number, (one, size) in enumerate(zip(storages, sizes))]
for _ in range(3):
    device.refill(wanted, arena)()
    for _ in range(3):
        threading.Thread(target=linger, daemon=True).start()
    heaps = {storage.data_ptr() // apart.HEAP_BYTES for storage in storages}
    device.free(storages)
    print(len(heaps), mapped(heaps))
"""


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """What the C library is told."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(malloc, "tell", lambda parameter, nbytes: told.append((parameter, nbytes)))
    malloc.may_set.cache_clear()
    yield told
    malloc.may_set.cache_clear()


def _rounds(script: str) -> list[list[str]]:
    """What each of three rounds said."""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    if "another C library" in child.stderr:
        pytest.skip("malloc is not glibc's, or set up by the environment")
    assert child.returncode == 0, child.stderr
    rounds = [line.split() for line in child.stdout.splitlines()]
    assert len(rounds) == 3
    return rounds


@pytest.mark.slow
def test_large_storages_lie_together_and_leave_together() -> None:
    for heaps, shared, share in _rounds(TOGETHER):
        assert int(heaps) <= 3  # 120 MiB
        assert int(shared) == 0
        assert float(share) > 0.95  # all that came had been given back before


@pytest.mark.slow
def test_whole_heaps_go_back_whatever_other_threads_keep() -> None:
    for heaps, left in _rounds(WHOLE):
        assert int(heaps) >= 4  # 252 MiB
        assert int(left) <= 1  # the one that the thread's arena begins in


def test_a_forked_process_takes_by_itself() -> None:
    apart.take_apart(lambda large: None, [("a", MIB)])
    child = os.fork()
    if not child:
        taken: list[tuple[str, int]] = []
        try:
            apart.take_apart(taken.extend, [("a", MIB)])
        finally:
            os._exit(0 if taken == [("a", MIB)] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_only_large_ones_are_taken_apart() -> None:
    at_least = apart.LARGE_BYTES
    assert apart.by_size([("a", at_least), ("b", at_least - 1), ("c", 5 * MIB)]) == (
        [("a", at_least), ("c", 5 * MIB)],
        [("b", at_least - 1)],
    )


def test_for_nothing_there_is_no_thread(settings: list[tuple[int, int]]) -> None:
    def never(large: list[tuple[str, int]]) -> None:
        raise AssertionError(large)

    apart.take_apart(never, [])
    assert settings == []


def test_the_caller_takes_what_no_thread_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    takers: list[threading.Thread] = []
    monkeypatch.setattr(apart, "_takers", [])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    apart.take_apart(lambda large: takers.append(threading.current_thread()), [("a", MIB)])
    assert takers == [threading.current_thread()]


def test_what_fails_there_fails_here() -> None:
    def take(large: list[tuple[str, int]]) -> None:
        raise LookupError(large[0][0])

    with pytest.raises(LookupError, match="a"):
        apart.take_apart(take, [("a", MIB)])


def test_whoever_is_interrupted_waits_for_the_end() -> None:
    ended = threading.Event()

    def take(large: list[tuple[str, int]]) -> None:
        _thread.interrupt_main()
        ended.wait(0.2)  # nobody sets it: the caller has time to leave too early
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        apart.take_apart(take, [("a", MIB)])
    assert ended.is_set()


def test_the_library_is_told_to_grow_by_heaps_only_meanwhile(settings: list[tuple[int, int]]) -> None:
    if not malloc.may_set():
        pytest.skip("malloc is not glibc's, or set up by the environment")

    def take(large: list[tuple[str, int]]) -> None:
        assert settings[-1] == (malloc.TOP_PAD, apart.HEAP_BYTES)

    apart.take_apart(take, [("a", MIB)])
    assert settings[-1] == (malloc.TOP_PAD, 128 << 10)
    with apart.emptied_heaps():
        assert settings[-1] == (malloc.TRIM_THRESHOLD, 128 << 10)
    assert settings[-1] == (malloc.TRIM_THRESHOLD, 64 << 20)


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_ARENA_MAX", "1"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")]
)
def test_what_the_user_has_set_up_is_left_alone(
    settings: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    taken: list[tuple[str, int]] = []
    apart.take_apart(taken.extend, [("a", MIB)])
    with apart.emptied_heaps():
        pass
    assert taken == [("a", MIB)]
    assert settings == []
