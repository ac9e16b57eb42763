"""A rank for tests, as a process of its own: talks like the agent, trains nothing.

    rank.py BOUNDARIES EXIT_CODE [--deaf] [--portable] [--looks]

counts boundaries, one every few milliseconds while it has a lease, and exits after ``BOUNDARIES``; if that
is a path, where it finds a file of that name. It reports its progress many times a second, but not each
boundary: a busy scheduler would hear of ever older ones, and its orders to stop would come ever later.
``--looks`` ends when it has a lease, and trains nothing.
``--deaf`` ignores SIGTERM. ``--portable`` says that another process could go on. ``--dies parking`` and
``--dies returning`` kill it in the middle of a suspend or resume. With ``RANK_LOCKS``, a directory, it is the
only one on its device, or says "clash". With ``WORLD`` above 1 and no ``RANK`` in the environment it is the
launcher of that many ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import zmq

from gpuslice import wire

PACE_MS = 2
REPORT_EVERY_S = 0.02


def say(line: str) -> None:
    """In one write: the ranks of a gang share a file."""
    os.write(1, f"{line}\n".encode())


class Rank:
    """One rank and its end of the socket."""

    def __init__(self, last: str) -> None:
        self.job = os.environ["GPUSLICE_JOB"]
        self.rank = int(os.environ.get("RANK", "0"))
        self.last = last
        self.boundary = 0
        self.epoch = 0
        self.reported_s = 0.0
        self.training = False
        self.stop_at: int | None = None
        self.lock: int | None = None
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.standing: wire.Suspended | None = None
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.poller = zmq.Poller()
        for source in (self.socket, self.monitor):
            self.poller.register(source, zmq.POLLIN)
        self.socket.connect(os.environ["GPUSLICE_SOCKET"])

    def send(self, message: wire.FromAgent) -> None:
        """Say something; it is lost while there is no scheduler, as much can be."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(wire.encode(message), zmq.NOBLOCK)

    def greet(self) -> None:
        """As on every connection: who and where we are."""
        self.monitor.recv_multipart()
        # Has the socket learn of the connection, for which sending alone does not look if it did just now.
        self.socket.get(zmq.EVENTS)
        self.send(
            wire.Hello(
                version=wire.PROTOCOL_VERSION,
                job=self.job,
                rank=self.rank,
                world_size=int(os.environ.get("WORLD", "1")),
                pid=os.getpid(),
                boundary=self.boundary,
                epoch=self.epoch,
                parked=not self.training,
            )
        )
        if self.standing is not None:
            self.send(self.standing)

    def run(self) -> None:
        while not self.over():
            ready = dict(self.poller.poll(PACE_MS if self.training else None))
            if self.monitor in ready:
                self.greet()
            if self.socket in ready:
                self.obey(wire.decode_to_agent(self.socket.recv()))
            elif self.training:
                self.pass_boundary()
        say(f"ends at {self.boundary}")
        self.send(wire.Bye(epoch=self.epoch, boundary=self.boundary, step=self.boundary))
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()
        zmq.Context.instance().term()

    def over(self) -> bool:
        """Whether this was the last boundary."""
        if "--looks" in sys.argv:
            return self.training
        return self.boundary >= int(self.last) if self.last.isdecimal() else os.path.exists(self.last)

    def die(self, when: str) -> None:
        """As if by ``kill -9``, if that is asked for."""
        if sys.argv[-2:] == ["--dies", when]:
            os.kill(os.getpid(), signal.SIGKILL)

    def pass_boundary(self) -> None:
        self.boundary += 1
        if time.monotonic() - self.reported_s >= REPORT_EVERY_S:
            self.reported_s = time.monotonic()
            self.send(wire.Progress(epoch=self.epoch, boundary=self.boundary, step=self.boundary))
        if self.boundary == self.stop_at:
            self.die("parking")
            self.training, self.stop_at = False, None
            self.leave()
            self.standing = wire.Suspended(
                epoch=self.epoch,
                boundary=self.boundary,
                step=self.boundary,
                nbytes=1,
                stages_s={"copy_out_s": 0.0},
                restartable="--portable" in sys.argv,
            )
            self.send(self.standing)

    def resume(self, epoch: int, device: str) -> None:
        self.epoch, self.training, self.standing = epoch, True, None
        self.enter(device)
        self.send(wire.Resumed(epoch=epoch, boundary=self.boundary, stages_s={}))

    def enter(self, device: str) -> None:
        """Be on ``device``, alone."""
        directory = os.environ.get("RANK_LOCKS")
        if directory is None:
            return
        self.leave()
        self.lock = os.open(Path(directory) / device, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"clash on {device}")

    def leave(self) -> None:
        """Be on no device."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def obey(self, message: wire.ToAgent) -> None:
        if isinstance(message, wire.Resume):
            if self.training:
                return
            if self.standing is not None:
                self.die("returning")
            self.resume(message.epoch, message.device)
        elif isinstance(message, wire.Suspend):
            if self.boundary >= message.stop_at:
                self.send(wire.Overshot(epoch=self.epoch, boundary=self.boundary))
            else:
                self.stop_at = message.stop_at


def launch_ranks(world: int) -> int:
    """What torchrun does: every rank in a session of its own; the first failure is ours, and ends all."""
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv], env={**os.environ, "RANK": str(rank)}, start_new_session=True
        )
        for rank in range(world)
    ]
    by_pid, code = {rank.pid: rank for rank in ranks}, 0
    while by_pid:
        pid, status = os.wait()
        by_pid.pop(pid)
        failed = abs(os.waitstatus_to_exitcode(status))
        if failed and not code:
            code = failed
            for rank in by_pid.values():
                rank.kill()
    return code


def main() -> int:
    world = int(os.environ.get("WORLD", "1"))
    if world > 1 and "RANK" not in os.environ:
        return launch_ranks(world)
    if "--deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("begins")
    Rank(sys.argv[1]).run()
    return int(sys.argv[2])


if __name__ == "__main__":
    sys.exit(main())
