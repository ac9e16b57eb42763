"""Memory that is filled while the rest is taken has every byte, and a failure leaves nothing taken."""

from __future__ import annotations

import threading

import pytest
import torch

from gpuslice.errors import DeviceMemoryError
from gpuslice.kernels import filling, sums
from gpuslice.kernels.copying import CHUNK_BYTES, Wanted
from gpuslice.kernels.cpu import CpuDevice
from gpuslice.types import DeviceName

from .test_sums import Arena, Check, content, storages


@pytest.fixture(autouse=True)
def _small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "_PORTION_BYTES", CHUNK_BYTES)


@pytest.fixture
def device() -> CpuDevice:
    """With four threads, which take turns on however few cores there are."""
    found = CpuDevice(DeviceName("cpu", None))
    found.cores = frozenset(range(4))
    return found


class Parked:
    """Storages that an arena has and that have no memory."""

    def __init__(self, device: CpuDevice) -> None:
        self.storages = storages()
        self.before = [content(storage) for storage in self.storages]
        self.arena = Arena(self.storages)
        self.arena.copy()
        self.wanted: Wanted = [(s, s.nbytes(), offset) for s, offset in self.arena.pairs]
        device.free(self.storages)

    def is_back(self) -> bool:
        return [content(storage) for storage in self.storages] == self.before

    def is_away(self) -> bool:
        return not any(storage.nbytes() for storage in self.storages)


def _nobody_copies() -> bool:
    return not any(thread.name.startswith("gpuslice-copy") for thread in threading.enumerate())


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("python", [False, True])
def test_every_byte_comes_back(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch, checked: bool, python: bool
) -> None:
    parked = Parked(device)
    if python:
        monkeypatch.setattr(sums, "load", lambda: (None, "not here"))
    inspect = Check(parked.arena) if checked else None
    finish = device.refill(parked.wanted, parked.arena.memory.toreadonly(), inspect)
    assert _nobody_copies()
    transfer = finish()
    assert _nobody_copies()
    assert parked.is_back()
    assert transfer.paths == {"host": sum(map(len, parked.before))}
    assert transfer.fallbacks == (("not here",) if python else ())


def test_storages_that_have_their_memory_are_filled_where_they_are(device: CpuDevice) -> None:
    parked = Parked(device)
    there = parked.storages[3::4]
    device.reserve([(s, nbytes) for s, nbytes, _ in parked.wanted[3::4]])
    addresses = [storage.data_ptr() for storage in there]
    device.refill(parked.wanted, parked.arena.memory)()
    assert [storage.data_ptr() for storage in there] == addresses
    assert parked.is_back()


def test_nothing_is_filled_of_nothing(device: CpuDevice) -> None:
    assert device.refill([], memoryview(b""))().paths == {}


class Failing(torch.UntypedStorage):
    """Its memory cannot be taken back."""

    failure: type[BaseException]

    def resize_(self, size: int) -> None:
        if size:
            raise self.failure


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(RuntimeError, DeviceMemoryError), (KeyboardInterrupt, KeyboardInterrupt)],
)
@pytest.mark.parametrize("position", [0, 6, -1])
def test_what_was_taken_is_given_back_when_the_rest_cannot_be(
    device: CpuDevice, failure: type[BaseException], raised: type[BaseException], position: int
) -> None:
    """Also if others are filling it; nobody touches it any more."""
    parked = Parked(device)
    failing = Failing(0)
    failing.failure = failure
    wanted = list(parked.wanted)
    wanted[position] = (failing, *wanted[position][1:])
    with pytest.raises(raised):
        device.refill(wanted, parked.arena.memory, Check(parked.arena))
    assert _nobody_copies()
    assert parked.is_away()
    device.refill(parked.wanted, parked.arena.memory, Check(parked.arena))()
    assert parked.is_back()


#: Chunk and byte; chunk 7 is large, and has a byte of padding.
DAMAGED = [(0, 0), (4, 0), (7, 0), (7, CHUNK_BYTES - 2), (7, CHUNK_BYTES - 1), (10, 0), (-1, CHUNK_BYTES - 1)]


@pytest.mark.parametrize(("index", "byte"), DAMAGED)
def test_a_damaged_chunk_is_an_error_once_all_is_taken(device: CpuDevice, index: int, byte: int) -> None:
    parked = Parked(device)
    wrong = parked.arena.chunks[index][0]
    parked.arena.memory[wrong + byte] ^= 1
    finish = device.refill(parked.wanted, parked.arena.memory, Check(parked.arena))
    with pytest.raises(LookupError) as caught:
        finish()
    assert caught.value.args == (wrong,)
    assert _nobody_copies()


def test_what_is_not_there_yet_is_not_touched(device: CpuDevice) -> None:
    """A chunk is copied after its storage has been followed, whoever waits for it."""
    parked = Parked(device)
    begun = filling.Filling(parked.wanted, parked.arena.memory, None, 4)
    first, *rest = filling.portions(parked.wanted)
    device.reserve([(s, nbytes) for s, nbytes, _ in parked.wanted])
    for storage in parked.storages:
        storage.fill_(7)
    with begun.beside():
        begun.follow(first)
    assert _nobody_copies()
    untouched = [content(storage) for portion in rest for storage, _, _ in portion]
    assert all(set(found) == {7} for found in untouched)


def test_without_threads_the_caller_copies_all(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    parked = Parked(device)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    device.refill(parked.wanted, parked.arena.memory)()
    assert parked.is_back()
