"""A private RAM disk on real tmpfs, and snapshots to put into it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpuslice.checkpoint.format import tree
from gpuslice.checkpoint.format.layout import Layout, StorageSpec, TensorSpec
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.slots import SLOTS, restartable
from gpuslice.checkpoint.ramdisk.store import JobStore

from ..patience import PATIENCE_S
from .harness import Job

MIB = 1 << 20
#: One large storage of several chunks, one just large enough, small ones, an empty one.
SIZES = (5 * MIB + 4, MIB, 100, 0, 4096)
TENSORS = (
    TensorSpec("model.weight", 0, "float32", (1280, 1024), (1024, 1)),
    TensorSpec("model.tied", 0, "float32", (1024, 1280), (1, 1024)),
    TensorSpec("model.bias", 2, "bfloat16", (50,), (1,)),
    TensorSpec("model.every_other", 2, "int16", (25,), (2,)),
    TensorSpec("empty", 3, "float32", (0, 7), (7, 1)),
    TensorSpec("moment", 1, "float64", (128, 1024), (1024, 1)),
    TensorSpec("z", 4, "complex64", (512,), (1,)),
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A spill directory, yet to be made."""
    return tmp_path / "spill"


@pytest.fixture
def disk(shm: Path) -> RamDisk:
    """A RAM disk of 256 MiB."""
    return RamDisk(shm / "disk", 256 * MIB)


@pytest.fixture
def store(disk: RamDisk) -> Iterator[JobStore]:
    """An open store of a job without a name."""
    with disk.open_store(None) as opened:
        yield opened


@pytest.fixture
def job() -> Job:
    """A small training after its first step."""
    return Job()


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a limit on processes."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def newest_of(disk: RamDisk, job: str, rank: int = 0) -> Path | None:
    """The newest whole restartable snapshot of a named job."""
    directory = disk.directory / f"{job}.r{rank}"
    record = next(restartable(directory), None)
    return None if record is None else directory / SLOTS[record.slot]


def layout_of(*sizes: int) -> Layout:
    """Storages of these sizes, in bytes."""
    return Layout(tuple(map(StorageSpec, sizes)))


def address_of(memory: memoryview) -> int:
    """Where ``memory`` begins."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def leftovers(disk: RamDisk) -> list[str]:
    """What a RAM disk holds beside its lock."""
    return sorted(name for name in os.listdir(disk.directory) if name != "lock")


Save = Callable[..., SnapshotFile]


@pytest.fixture
def save() -> Save:
    """``save(store, boundary=...)`` publishes a snapshot whose bytes depend on the boundary."""

    def save_snapshot(
        store: JobStore,
        *,
        boundary: int = 1,
        restartable: bool = True,
        sizes: tuple[int, ...] = SIZES,
        tensors: tuple[TensorSpec, ...] | None = None,
        value: object = None,
    ) -> SnapshotFile:
        layout = Layout(tuple(StorageSpec(n, "cpu", f"storage-{i}") for i, n in enumerate(sizes)))
        writer = store.begin(layout)
        for sid, nbytes in enumerate(sizes):
            writer.view(sid)[:] = content(boundary, sid, nbytes)
        chosen = (TENSORS if sizes == SIZES else ()) if tensors is None else tensors
        return writer.publish(tree.encode(value), chosen, boundary=boundary, restartable=restartable)

    return save_snapshot


def content(boundary: int, sid: int, nbytes: int) -> bytes:
    """The bytes that ``save`` puts into a storage: a pattern without a short period."""
    seed = f"{boundary}.{sid}.".encode()
    block = bytes((i * 131 + i // 251 + len(seed) * sid + boundary) % 256 for i in range(min(nbytes, 65521)))
    return (block * (nbytes // max(1, len(block)) + 1))[:nbytes]


@pytest.fixture
def pattern() -> Callable[[int, int, int], bytes]:
    """``pattern(boundary, sid, nbytes)``: what ``save`` wrote."""
    return content


@pytest.fixture
def snapshot_path(disk: RamDisk, save: Save) -> Path:
    """A snapshot file that no process has open."""
    with disk.open_store("sample") as store:
        return save(store, boundary=7, value={"epoch": 3, "lr": 0.125}).path


class ActorProcess:
    """Another process that works on the same RAM disk; see actor.py for what it can do."""

    def __init__(self, disk: RamDisk) -> None:
        script = Path(__file__).with_name("actor.py")
        command = [sys.executable, str(script), str(disk.directory), str(disk.limit_bytes)]
        if disk.spilled is not None:
            command.append(str(disk.spilled.directory))
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, command: str, **arguments: object) -> None:
        """Send a command without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[str, object] | None:
        """``("ok", result)``, ``(error, message)``, or ``None`` if the process died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return tuple(json.loads(line)) if line else None

    def ask(self, command: str, **arguments: object) -> tuple[str, object] | None:
        """Send a command and wait for its answer."""
        self.tell(command, **arguments)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL, and wait until it is over."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def end(self) -> None:
        """Kill it and close its pipes."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def actor(disk: RamDisk) -> Iterator[Callable[..., ActorProcess]]:
    """``actor()`` starts another process on the same RAM disk, or on the one that it is given."""
    started: list[ActorProcess] = []

    def start(on: RamDisk = disk) -> ActorProcess:
        started.append(ActorProcess(on))
        return started[-1]

    yield start
    for process in started:
        process.end()
