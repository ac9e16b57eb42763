"""Processes that swap on one device, with a memory that they share, and faults in the midst of it.

Run (by the fixture ``troupe``) with the path of a socket: for every line on stdin it forks a `Player`, which
connects to the socket and obeys JSON lines there. Torch is imported once, and nothing is computed before.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # what the first step of an optimizer would import, in every player

from gpuslice.checkpoint.discover.heap import hide_imports
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch import swap_protocol
from gpuslice.checkpoint.switch.record import SwitchRecord
from gpuslice.checkpoint.switch.swap_endpoints import Successor, SwapListener
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import DeviceMemoryError, GpusliceError
from gpuslice.kernels.device import DeviceMemory
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.kernels.transfer import Checksums, Inspector, Pairs, Transfer
from gpuslice.types import DeviceName

from ..patience import PATIENCE_S
from .harness import Broken, Job, digest

#: What leaves at once: a few of these make up a job.
PORTION_BYTES = 400_000
_PLACES = 4
_PLACE = struct.Struct("qq")


class Memory:
    """Of an imagined device: bytes by process, in a file that all of them map. The dead hold nothing."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), 8 + _PLACES * _PLACE.size)
        self.refusals = 0

    def free_bytes(self) -> int:
        return struct.unpack_from("q", self._map)[0] - sum(self._held())

    def _held(self) -> list[int]:
        places = [_PLACE.unpack_from(self._map, 8 + number * _PLACE.size) for number in range(_PLACES)]
        return [nbytes for pid, nbytes in places if pid and _lives(pid)]

    def take(self, nbytes: int) -> None:
        """``DeviceMemoryError`` if there is not so much."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            if nbytes > self.free_bytes():
                self.refusals += 1
                raise DeviceMemoryError(f"{self.free_bytes()} bytes are free, not {nbytes}")
            self._add(nbytes)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def give(self, nbytes: int) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._add(-nbytes)
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def _add(self, nbytes: int) -> None:
        for number in range(_PLACES):
            pid, held = _PLACE.unpack_from(self._map, 8 + number * _PLACE.size)
            if pid == os.getpid() or not pid or not _lives(pid):
                held = held if pid == os.getpid() else 0
                _PLACE.pack_into(self._map, 8 + number * _PLACE.size, os.getpid(), held + nbytes)
                return
        raise AssertionError("too many processes")

    def close(self) -> None:
        self._map.close()
        self._file.close()

    def held_by(self, process: int) -> int:
        places = [_PLACE.unpack_from(self._map, 8 + number * _PLACE.size) for number in range(_PLACES)]
        return sum(nbytes for pid, nbytes in places if pid == process)


def make_memory(path: Path) -> None:
    """A device with more memory than anybody needs."""
    path.write_bytes(struct.pack("q", 1 << 40) + bytes(_PLACES * _PLACE.size))


def limit_memory(path: Path, nbytes: int) -> None:
    """Let it have ``nbytes`` from now on."""
    with path.open("r+b") as file:
        file.write(struct.pack("q", nbytes))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Fault:
    """What happens in the Nth step from now on: ``fail``, ``kill``, ``stop``, or ``stop and fail``."""

    def __init__(self, number: int, action: str, say: Callable[[Any], None]) -> None:
        self.left = number
        self.action = action
        self._say = say

    def step(self) -> bool:
        """Whether this step has to fail half-way."""
        self.left -= 1
        if self.left != 0:
            return False
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action.startswith("stop"):
            self._say("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
        return self.action.endswith("fail")


class ScriptedDevice(CpuDevice):
    """The host as a device whose memory is `Memory`, and that fails as a `Fault` says.

    Parameters
    ----------
    overhead
        How much more than the sum of the sizes an allocation takes.
    """

    def __init__(self, memory: Memory, overhead: float = 1.0) -> None:
        super().__init__(DeviceName("cpu", None))
        self.shared = memory
        self.overhead = overhead
        self.fault: Fault | None = None
        self._away: dict[int, int] = {}

    def _step(self) -> bool:
        return self.fault is not None and self.fault.step()

    def memory(self) -> DeviceMemory:
        free_bytes = self.shared.free_bytes()
        return DeviceMemory(1 << 40, (1 << 40) - free_bytes, None, self.shared.held_by(os.getpid()))

    def copy_out(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        broken = self._step()
        transfer = super().copy_out(pairs[: len(pairs) // 2] if broken else pairs, arena, inspect, checksums)
        return _unless(broken, transfer)

    def copy_in(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        broken = self._step()
        self._came([storage for storage, _ in pairs])
        transfer = super().copy_in(pairs[: len(pairs) // 2] if broken else pairs, arena, inspect, checksums)
        return _unless(broken, transfer)

    def free(self, storages: Sequence[torch.UntypedStorage]) -> None:
        broken = self._step()
        going = storages[: len(storages) // 2] if broken else storages
        sizes = {storage._cdata: storage.nbytes() for storage in going if storage.nbytes()}
        super().free(going)
        self._went(sizes)
        _unless(broken, None)

    def discard(self, storages: Sequence[torch.UntypedStorage]) -> None:
        sizes = {s._cdata: s.nbytes() for s in storages if s._cdata not in self._away}
        super().discard(storages)
        self._went(sizes)

    def release_caches(self, *, workspaces: bool = True) -> None:
        broken = self._step()
        super().release_caches(workspaces=workspaces)
        _unless(broken, None)

    def reserve(self, pairs: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        _unless(self._step(), None)
        missing = [(storage, nbytes) for storage, nbytes in pairs if storage.nbytes() != nbytes]
        needed = int(sum(nbytes for _, nbytes in missing) * self.overhead)
        self.shared.take(needed)
        self.shared.give(needed)
        self._came([storage for storage, _ in missing])
        super().reserve(pairs)

    def _went(self, sizes: dict[int, int]) -> None:
        self._away |= sizes
        self.shared.give(sum(sizes.values()))

    def _came(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self.shared.take(sum(self._away.pop(storage._cdata, 0) for storage in storages))


def _unless(broken: bool, transfer: Any) -> Any:
    if broken:
        raise Broken("as ordered")
    return transfer


class Roomy(Job):
    """With a few larger tensors besides, and two storages that overlap."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.large = [torch.full((60_000,), float(number)) for number in range(4)]
        self.base = np.arange(50_000.0)
        self.overlapping = [torch.from_numpy(self.base), torch.from_numpy(self.base[1000:])]
        super().__init__()

    def step(self) -> None:
        super().step()
        for tensor in [*self.large, self.overlapping[0]]:
            tensor += len(self.name)

    def digest(self) -> str:
        return digest(super().digest(), self.large, self.base, self.overlapping)


class Player:
    """One process; its methods are what it can be told."""

    def __init__(self, disk: str, memory: str, say: Callable[[Any], None]) -> None:
        torch.set_num_threads(1)
        self.disk = RamDisk(Path(disk), 256 << 20)
        self.device = ScriptedDevice(Memory(Path(memory)))
        self._say = say
        self.store: JobStore | None = None
        self.listener: SwapListener | None = None

    def prepare(self, name: str) -> int:
        """Get a state and let a first snapshot of it be restartable; how large it is on the device."""
        self.name = name
        self.store = self.disk.open_store(name)
        self.switch = Switch(self.device, self.store)
        self.job = Roomy(name)
        self.boundary = 0
        self.patience_s = 60.0
        self.suspend()
        nbytes = -self.device.shared.held_by(os.getpid())  # nothing of it was counted when it was made
        self.device.shared.give(-nbytes)
        self.switch.resume()
        self.train()
        return nbytes

    def train(self) -> None:
        self.job.step()
        self.digest = self.job.digest()

    def patient(self, seconds: float, overhead: float = 1.0) -> None:
        self.patience_s, self.device.overhead = seconds, overhead

    def arm(self, number: int, action: str) -> None:
        """Have something happen in a later step of the device, or of the talk."""
        fault = self.device.fault = Fault(number, action, self._say)
        try_send = swap_protocol.End.try_send

        def told(end: Any, message: Any) -> bool:
            # Whoever ends before its offer was never there.
            if fault.action in ("kill", "stop") and not isinstance(message, swap_protocol.Offer):
                fault.step()
            return try_send(end, message)

        swap_protocol.End.try_send = told  # type: ignore[method-assign]

    def left(self) -> int:
        """How many steps too few there were for the fault; at most 0 if it happened. Disarms it."""
        fault, self.device.fault = self.device.fault, None
        return 0 if fault is None else fault.left

    def suspend(self, successor: Successor | None = None) -> dict[str, object]:
        self.boundary += 1
        named = {"model": self.job.model, "optimizer": self.job.optimizer}
        record = self.switch.suspend(
            boundary=self.boundary, named=named, restartable=True, successor=successor
        )
        return _told(record)

    def _terms(self, predecessor: str, successor: str) -> swap_protocol.Terms:
        return swap_protocol.Terms(predecessor, successor, 3, "cpu")

    def leave(self, successor: str) -> dict[str, object]:
        """Suspend, and let somebody else have the device meanwhile."""
        directory = self.disk.directory / f"{successor}.r0"
        terms = self._terms(self.name, successor)
        there = Successor(directory, terms, portion_bytes=PORTION_BYTES, patience_s=self.patience_s)
        return self.suspend(there)

    def open(self, predecessor: str) -> None:
        """Let somebody knock who is about to leave."""
        assert self.store is not None
        terms = self._terms(predecessor, self.name)
        self.listener = SwapListener(
            self.store.directory, terms, portion_bytes=PORTION_BYTES, patience_s=self.patience_s
        )

    def arrive(self) -> dict[str, object] | None:
        """Wait for whoever knocks, and take the device over; nothing if nobody does."""
        assert self.listener is not None
        successor = self.listener.await_predecessor(PATIENCE_S)
        self.listener.close()
        return None if successor is None else _told(self.switch.resume(swap=successor))

    def resume(self) -> dict[str, object]:
        return _told(self.switch.resume())

    def whole(self) -> list[object]:
        """Whether it is suspended; or else whether its state is as it was."""
        if self.switch.suspended:
            return ["suspended", True]
        return ["running", self.job.digest() == self.digest]

    def refusals(self) -> int:
        return self.device.shared.refusals

    def close(self) -> None:
        assert self.store is not None
        self.store.close(keep=False)


def _told(record: SwitchRecord) -> dict[str, object]:
    return {"given": record.bytes_given, "taken": record.bytes_taken, "freed": record.bytes_freed}


def play(address: str, arguments: list[str]) -> None:
    """A child's life."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    stream = connection.makefile("rw")

    def say(answer: Any) -> None:
        stream.write(json.dumps(answer) + "\n")
        stream.flush()

    say(os.getpid())
    player = Player(*arguments, say)
    for line in stream:
        command, options = json.loads(line)
        try:
            say(["ok", getattr(player, command)(**options)])
        except (GpusliceError, Broken) as error:
            say([type(error).__name__, str(error)])


def main() -> None:
    hide_imports()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            try:
                play(sys.argv[-1], json.loads(line))
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
