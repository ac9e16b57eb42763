"""Another process for the RAM disk's tests: obeys JSON lines on stdin, answers each with one on stdout.

Run as a script with the RAM disk's directory and limit, and the spill directory if there is one.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from gpuslice.checkpoint.format import tree
from gpuslice.checkpoint.format.layout import Layout, StorageSpec
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.ramdisk.budget import Tenant
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.room_requests import request_room
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import GpusliceError
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

CHANGING = ("open", "ftruncate", "posix_fallocate", "pwrite", "replace", "link", "unlink", "fsync", "rmdir")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """Kills the process in the Nth call: before it has done anything, or halfway through a write."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        for name in CHANGING:
            setattr(os, name, self.wrap(getattr(os, name)))
        mmap.mmap = self.wrap(mmap.mmap)  # type: ignore[misc,assignment]

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls -= 1
            if self.calls == 0:
                if function.__name__ == "pwrite":
                    descriptor, data, position = arguments
                    function(descriptor, memoryview(data)[: len(data) // 2], position)
                die()
            return function(*arguments, **options)

        return counted


def survives(work: Callable[[], object]) -> bool:
    """Whether a child comes to the end of this."""
    return survivors([work])[0]


def survivors(works: Sequence[Callable[[], object]]) -> list[bool]:
    """Which of as many children, all at once, come to the end of theirs."""
    pids = []
    for work in works:
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                work()
                os._exit(0)
            finally:
                os._exit(1)
    return [os.waitpid(pid, 0)[1] == 0 for pid in pids]


class Actor:
    """The commands."""

    def __init__(self, directory: str, limit_bytes: str, spill: str = "") -> None:
        self.disk = RamDisk(Path(directory), int(limit_bytes), spill_directory=Path(spill) if spill else None)
        self.store: JobStore | None = None
        self.snapshot: SnapshotFile | None = None
        self.parked = ExitStack()

    def open(self, job: str | None, rank: int = 0, ranks: int = 1) -> None:
        self.store = self.disk.open_store(job, rank, ranks=range(ranks))

    def belong(self, tenant: str, limit_bytes: int) -> None:
        """From now on a process of a tenant's."""
        self.disk = RamDisk(self.disk.directory, self.disk.limit_bytes, tenant=Tenant(tenant, limit_bytes))

    def serve(self, scheduler: str) -> None:
        """From now on a process of a scheduler's job."""
        self.disk = RamDisk(self.disk.directory, self.disk.limit_bytes, scheduler=scheduler)

    def save(self, boundary: int, nbytes: int = 3 << 20, restartable: bool = True) -> int:
        assert self.store is not None
        writer = self.store.begin(Layout((StorageSpec(nbytes), StorageSpec(8))))
        writer.view(0)[:] = bytes([boundary % 256]) * nbytes
        writer.view(1)[:] = boundary.to_bytes(8, "little")
        tree_ = tree.encode(boundary)
        self.snapshot = writer.publish(tree_, [], boundary=boundary, restartable=restartable)
        return self.snapshot.generation

    def share(self, boundary: int, nbytes: int, count: int = 8, die_in: int = 0, own: int = 0) -> int:
        """Save what every rank has, in ``count`` storages; or die in the Nth call that changes something.

        The last storage begins with the byte ``own``.
        """
        import torch

        assert self.store is not None
        torch.manual_seed(boundary)
        sizes = [nbytes // count] * count
        tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
        tensors[-1][0] = own
        if die_in:
            Countdown(die_in)
        host = open_device(DeviceName("cpu", None))
        specs = map(StorageSpec, sizes)
        with self.store.begin(Layout(tuple(specs)), share=True) as writer:
            storages = (tensor.untyped_storage() for tensor in tensors)
            writer.take(host, zip(storages, writer.offsets, strict=True))
            self.snapshot = writer.publish(tree.encode(boundary), [], boundary=boundary, restartable=True)
        same = [self.snapshot.view(sid) == one.numpy().tobytes() for sid, one in enumerate(tensors)]
        return self.snapshot.nbytes if all(same) else -1

    def park(self) -> None:
        """Let others have the room of what was saved last."""
        assert self.store is not None
        assert self.snapshot is not None
        self.parked.enter_context(self.store.offering(self.snapshot))

    def come_back(self) -> list[int]:
        """What was saved last: the one byte that fills its first storage, and its second."""
        assert self.store is not None
        assert self.snapshot is not None
        self.parked.close()
        self.store.bring_back(self.snapshot)
        (value,) = set(self.snapshot.view(0))
        return [value, int.from_bytes(self.snapshot.view(1), "little")]

    def begin(self, nbytes: int) -> None:
        assert self.store is not None
        self.store.begin(Layout((StorageSpec(nbytes),)))

    def close(self, keep: bool) -> None:
        assert self.store is not None
        self.store.close(keep=keep)

    def collect(self, everything: bool = False) -> int:
        return len(self.disk.collect(everything=everything))

    def crash(self, directory: str, saved: int, step: int) -> bool:
        """In a child, on another RAM disk: save some snapshots, die in the next one; whether it did not."""

        def save() -> None:
            child = Actor(directory, str(self.disk.limit_bytes))
            child.open("a")
            for boundary in range(1, saved + 1):
                child.save(boundary)
            Countdown(step)
            child.save(saved + 1)

        return survives(save)

    def crash_sharing(self, directory: str, step: int) -> bool:
        """In a child: one rank saves, another dies when it saves almost the same; whether it did not."""
        import torch  # before the fork

        torch.set_num_threads(1)

        def save() -> None:
            ranks = [Actor(directory, str(self.disk.limit_bytes)) for _ in range(2)]
            for rank, actor in enumerate(ranks):
                actor.open("ddp", rank, 2)
                actor.share(1, 5 << 20, 2, own=rank, die_in=step if rank == 1 else 0)

        return survives(save)

    def gang(self, directory: str, boundary: int, nbytes: int, die_in: int = 0) -> list[bool]:
        """In three children, which are the ranks of a job: save the same at once; which came to their end.

        The first rank dies in the Nth call that changes something.
        """
        import torch  # before the forks

        torch.set_num_threads(1)

        def save(rank: int) -> None:
            actor = Actor(directory, str(self.disk.limit_bytes))
            actor.open("ddp", rank, 3)
            assert actor.share(boundary, nbytes, die_in=die_in if rank == 0 else 0) == nbytes

        return survivors([partial(save, rank) for rank in range(3)])

    def crash_around(self, directory: str, step: int) -> bool:
        """In a child: die while a store is opened, warmed up and closed; whether it did not."""

        def open_and_close() -> None:
            Countdown(step)
            child = Actor(directory, str(self.disk.limit_bytes))
            child.open("a")
            assert child.store is not None
            warming = child.store.warm_up(Layout((StorageSpec(1 << 20),)))
            assert warming is not None
            warming.join()
            child.close(keep=True)

        return survives(open_and_close)

    def crash_spilling(self, directory: str, spill: str, step: int) -> bool:
        """In a child: die while snapshots are spilled; whether it did not."""

        def move() -> None:
            disk = RamDisk(Path(directory), self.disk.limit_bytes, spill_directory=Path(spill))
            Countdown(step)
            disk.spill()

        return survives(move)

    def crash_parked(self, directory: str, spill: str, step: int) -> bool:
        """In a child: park, be moved out slot by slot, come back, go on, and die at some step of that."""

        def move() -> None:
            child = self._with_two_snapshots(directory, spill)
            Countdown(step)
            child.park()
            child.give_all()
            assert child.come_back() == [5, 5]

        return survives(move)

    def _with_two_snapshots(self, directory: str, spill: str) -> Actor:
        """Another one, on another RAM disk, that has saved boundaries 4 and 5."""
        child = Actor(directory, str(self.disk.limit_bytes), spill)
        child.open("a")
        child.save(4, 1 << 20)
        child.save(5, 1 << 20)
        return child

    def give_all(self) -> None:
        """Ask oneself for room until there is no more to give."""
        assert self.store is not None
        while request_room(self.store.directory):
            pass

    def begin_in_child(self) -> list[str]:
        """What a forked child gets when it uses the store it inherited, and then closes it."""
        assert self.store is not None
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                self.store.begin(Layout(()))
            except GpusliceError as error:
                os.write(write, type(error).__name__.encode())
            self.store.close(keep=False)
            os.write(write, b" closed")
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            answer = pipe.read().decode().split()
        os.wait()
        return answer

    def fork(self) -> int:
        """A child that lives on until this process's stdin ends, as a DataLoader's worker might.

        When this answers, it has let go of what children let go of.
        """
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(1)
            os.write(write, b".")
            while os.read(0, 1):
                pass
            os._exit(0)
        os.read(read, 1)
        os.close(read)
        os.close(write)
        return pid


def main() -> None:
    actor = Actor(*sys.argv[1:])
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            answer: list[Any] = ["ok", getattr(actor, command)(**arguments)]
        except GpusliceError as error:
            answer = [type(error).__name__, str(error)]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
