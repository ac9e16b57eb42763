"""Ranks that train nothing, many in one process, and the scheduler that they talk to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import zmq

from gpuslice import wire
from gpuslice.client.client import Client

#: In the scheduler's directory, for ranks.
SOCKET = "scheduler.sock"


@contextmanager
def scheduler(directory: Path, *options: str) -> Iterator[Client]:
    """``gpuslice up`` with ``options``, as users start it."""
    up = [sys.executable, "-m", "gpuslice", "up", *options, "--state-dir", str(directory)]
    subprocess.run(up, check=True, stdout=subprocess.DEVNULL)
    with Client(directory) as client:
        process = psutil.Process(client.status().pid)
        try:
            yield client
        finally:
            # Not `down`: that would end the processes of the ranks, which is this one.
            family = [process, *process.children(recursive=True)]
            for one in family:
                one.kill()
            psutil.wait_procs(family)


class Sockets:
    """DEALER sockets of one context; a context manager that closes them all."""

    def __init__(self, most: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, most)
        self._open: list[zmq.Socket[bytes]] = []

    def __enter__(self) -> Sockets:
        return self

    def __exit__(self, *_: object) -> None:
        for socket in self._open:
            socket.close(linger=0)
        self._context.term()

    def dealer(self, path: Path) -> zmq.Socket[bytes]:
        """A socket that is connected to the one at ``path``."""
        self._open.append(self._context.socket(zmq.DEALER))
        self._open[-1].connect(f"ipc://{path}")
        return self._open[-1]


class Rank:
    """The scheduler's view of one rank, moved by hand."""

    def __init__(self, socket: zmq.Socket[bytes], job: str, rank: int = 0, world: int = 1) -> None:
        self.epoch = 0
        self.boundary = 0
        self.socket = socket
        # The pid is whatever the kernel says it is.
        hello = wire.Hello(version=wire.PROTOCOL_VERSION, job=job, rank=rank, world_size=world, pid=0)
        self.socket.send(wire.encode(hello))

    def heartbeat(self) -> None:
        """Be one mini-batch further, if there is a device to compute on, and say where."""
        self.boundary += self.epoch > 0
        self.socket.send(
            wire.encode(wire.Progress(epoch=self.epoch, boundary=self.boundary, step=self.boundary))
        )

    def receive(self) -> wire.ToAgent:
        """The next order."""
        return wire.decode_to_agent(self.socket.recv())

    def await_order(self, kind: type[wire.ToAgent]) -> wire.ToAgent:
        """Orders until one is of ``kind``."""
        while not isinstance(order := self.receive(), kind):
            pass
        return order

    def resumed(self, order: wire.Resume) -> None:
        """Be on the device; the first time, at the first boundary at once."""
        self.epoch = order.epoch
        self.socket.send(wire.encode(wire.Resumed(epoch=self.epoch, boundary=self.boundary, stages_s={})))
        if not self.boundary:
            self.heartbeat()

    def park(self, order: wire.Suspend) -> None:
        """Be off it."""
        self.boundary = order.stop_at
        stages_s = {"find_s": 0.03, "copy_out_s": 0.01, "publish_s": 0.001, "free_s": 0.002}
        report = wire.Suspended(
            epoch=self.epoch, boundary=self.boundary, step=self.boundary, nbytes=10**9, stages_s=stages_s
        )
        self.socket.send(wire.encode(report))
