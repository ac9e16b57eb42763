"""Processes that have torch, or gpuslice's commands, the moment they begin: forks of a Python with them."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("server.py")
#: What a server imports, and its seeds of ``hash``. Of two trainings that begin one after the other each has
#: its own, as ever.
SEEDS = {"torch": ("1", "2"), "gpuslice": ("1",)}
#: Length of a variable in whose place the forks have theirs, where other processes read them.
ROOM_BYTES = 1 << 15


class Servers:
    """One for each seed, which all that have the same directory share.

    Whoever needs it first starts it; it ends when all have closed their connections.

    Parameters
    ----------
    what
        A key of `SEEDS`: torch for scripts, or gpuslice for commands that run no script themselves.
    """

    def __init__(self, directory: Path, what: str) -> None:
        self._directory = directory
        self._what = what
        self._turns = itertools.cycle(SEEDS[what])
        self._started: dict[str, socket.socket] = {}

    @classmethod
    @contextmanager
    def shared(cls, base: Path, what: str) -> Iterator[Servers]:
        """Those of all workers of pytest-xdist, whose base directories are beside each other."""
        found = cls(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base, what)
        yield found
        found.close()

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """``subprocess.Popen`` for a command of this Python: a script, or ``-m`` and a module."""
        return Process(self._server(next(self._turns)), command, **options)

    def _server(self, seed: str) -> socket.socket:
        if seed not in self._started:
            self._started[seed] = self._connection(seed)
        return self._started[seed]

    def _connection(self, seed: str) -> socket.socket:
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lock = self._directory / f"warm-{self._what}-{seed}.lock"
        # Not a path, which may be too long.
        address = "\0gpuslice-" + hashlib.sha256(os.fsencode(lock)).hexdigest()[:32]
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                ours.connect(address)
            except ConnectionRefusedError:
                _start_server(self._what, seed, address, lock)
                ours.connect(address)
        return ours

    def close(self) -> None:
        """Nothing more will be started, so the servers end."""
        for server in self._started.values():
            server.close()


def _start_server(what: str, seed: str, address: str, lock: Path) -> None:
    """Start one that listens, and wait until it has imported all."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": seed, "ROOM": "-" * ROOM_BYTES}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        command = [sys.executable, "-P", str(SERVER), what, str(listener.fileno()), str(lock)]
        subprocess.run(command, env=environ, pass_fds=[listener.fileno()], check=True)


class Process(subprocess.Popen[str]):
    """A fork of a server, whose child it is: only the server can wait for it, and tells how it ended."""

    def __init__(self, server: socket.socket, command: Sequence[str], **options: Any) -> None:
        self._server = server
        self._status = -1
        super().__init__(command, **options)

    def _execute_child(self, *arguments: Any) -> None:
        """Have the server fork. The arguments are those of CPython's own method."""
        command, *_, cwd, environ = arguments[:7]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = arguments[10:16]
        given = (p2cread, c2pwrite, errwrite)
        streams = [number if stream == -1 else stream for number, stream in enumerate(given)]
        self._status, status = os.pipe()
        try:
            order = json.dumps([list(command), str(cwd or os.getcwd()), dict(environ or os.environ)])
            socket.send_fds(self._server, [order.encode()], [*streams, status])
            self.pid = int(self._server.recv(16))
        finally:
            os.close(status)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """``os.waitpid`` for it."""
        readable, _, _ = select.select([self._status], [], [], 0 if wait_flags else None)
        return (self.pid, int(os.read(self._status, 16))) if readable else (0, 0)

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode

    def _handle_exitstatus(self, status: int) -> None:
        os.close(self._status)
        super()._handle_exitstatus(status)  # type: ignore[misc]
