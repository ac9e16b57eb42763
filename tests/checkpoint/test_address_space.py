"""A process that may map no more memory: it is told so, nothing is taken for damaged, and nothing is lost."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import AddressSpaceError, EnvironmentUnusableError

from ..patience import PATIENCE_S
from .conftest import MIB, Save, newest_of

#: Runs under a limit that leaves room for Python, not for the snapshot.
RESTART = f"""
import resource, sys
from pathlib import Path
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.errors import AddressSpaceError

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {32 * MIB}, resource.RLIM_INFINITY))
disk = RamDisk(Path(sys.argv[1]), {256 * MIB})
store = disk.open_store("a")

def refused(act):
    try:
        act()
    except AddressSpaceError as error:
        assert "can map no further" in error.message and "its limit is" in error.message, error.message
        assert "ulimit -v" in error.remedy
        print(error.exit_code)

refused(store.restartable)
store.close(keep=True)
refused(disk.collect)
"""


def test_a_restart_under_a_limit_on_addresses_keeps_the_snapshot(disk: RamDisk, save: Save) -> None:
    with disk.open_store("a") as store:
        save(store, boundary=3, sizes=(64 * MIB,))
    found = subprocess.run(
        [sys.executable, "-c", RESTART, str(disk.directory)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (found.returncode, found.stdout.split()) == (0, ["3", "3"]), found.stderr
    with open_snapshot(newest_of(disk, "a") or Path()) as snapshot:
        snapshot.verify()
        assert snapshot.boundary == 3


def failing_at(patch: pytest.MonkeyPatch, number: int) -> Callable[[], bool]:
    """Let the kernel refuse the process's mapping of that number; tells whether it has."""
    left, mapped = [number], mmap.mmap

    def refuse(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return mapped(*arguments, **options)

    patch.setattr(mmap, "mmap", refuse)
    return lambda: left[0] <= 0


def refusals(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> int:
    """How many mappings it takes to ``act``; each was refused once, and the error named that."""
    for number in range(1, 20):
        with monkeypatch.context() as patch:
            hit = failing_at(patch, number)
            try:
                act()
            except AddressSpaceError:
                assert hit()
            else:
                assert not hit()
                return number - 1
    pytest.fail("it never came to its end")


def test_a_suspend_is_refused(store: JobStore, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusals(monkeypatch, lambda: save(store, boundary=1)) > 0
    assert save(store, boundary=2).boundary == 2


@pytest.mark.parametrize("cause", ["no addresses", "no page lock"])
def test_a_new_arena_that_cannot_be_used_takes_no_room(
    store: JobStore, save: Save, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    def locking(memory: memoryview) -> None:
        raise EnvironmentUnusableError("cudaHostRegister failed with CUDA error 2")

    with monkeypatch.context() as patch:
        if cause == "no addresses":
            failing_at(patch, 1)
        else:
            store.bind(locking, lambda memory: None)
        with pytest.raises(EnvironmentUnusableError):
            save(store, boundary=1)
    assert os.listdir(store.directory) == ["owner"]
    store.bind(lambda memory: None, lambda memory: None)
    save(store, boundary=2).verify()


def test_what_was_spilled_stays_there_until_it_can_come_back(
    shm: Path, place: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RamDisk(shm / "disk", 64 * MIB, spill_directory=place)
    with disk.open_store("a") as store:
        snapshot = save(store, boundary=1)
        expected = bytes(snapshot.view(0))
        assert refusals(monkeypatch, lambda: store.slots[snapshot.record.slot].free_memory()) > 0
        assert sorted(os.listdir(place)) == ["a.r0.A.gsnp", "lock"]
        assert refusals(monkeypatch, lambda: store.bring_back(snapshot)) > 0
        snapshot.verify()
        assert snapshot.view(0) == expected
