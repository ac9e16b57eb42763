"""A Python that has imported torch, or gpuslice's commands; asked for a command, it forks and becomes that.

Run with ``torch`` or ``gpuslice``, the descriptor of a listening socket, to which `process.py` connects and
sends orders, and the name of a file that is locked while somebody connects.

``torch``: importing torch, and what it imports when an optimizer is made, takes seconds; most scripts of the
tests take a fraction of one. What a fork runs sees nothing of it: the modules are taken out of
``sys.modules`` and come back when they are imported, so whoever waits for ``import torch`` is told in time.

``gpuslice``: a command and the scheduler import for longer than they work for a test. Their modules stay. A
scheduler that ``gpuslice up`` starts in the background is a fork, too.

Not as in a Python of its own are the frames below a script in a traceback, the interpreter's options, the
seed of ``hash``, which all forks of one server share, and that nothing is taken apart after the last exit
handler.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import fcntl
import importlib
import json
import os
import pkgutil
import random
import runpy
import selectors
import site
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

MAX_ORDER_BYTES = 1 << 17


class Order(NamedTuple):
    """A command, where it runs, and the descriptors that it gets besides the standard streams."""

    command: list[str]
    directory: str
    environ: dict[str, str]
    descriptors: Sequence[int] = ()


class Executed(BaseException):
    """Somebody has called ``os.execvpe``, or has forked: with this order."""


class Shelf:
    """Modules that one ``import`` has loaded, and that seem not to be loaded until it is said again.

    Those of the standard library stay.
    """

    def __init__(self, name: str) -> None:
        before = set(sys.modules)
        importlib.import_module(name)
        self._name = name
        self._modules = {
            found: module
            for found, module in sys.modules.items()
            if found not in before and found.partition(".")[0] not in sys.stdlib_module_names
        }
        self._specs = {found: module.__spec__ for found, module in self._modules.items()}
        #: Those that are attributes of a package which was there before.
        self._below = [
            (sys.modules[package], child, self._modules[found])
            for found in self._modules
            for package, _, child in [found.rpartition(".")]
            if package and package not in self._modules
        ]

    def hide(self) -> None:
        """Take them away."""
        for name in self._modules:
            sys.modules.pop(name, None)
        for package, child, _ in self._below:
            vars(package).pop(child, None)
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self._modules else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to be executed."""
        assert module.__spec__ is not None
        name = module.__spec__.name
        module.__spec__ = self._specs[name]
        if name == self._name:
            for other, loaded in self._modules.items():
                sys.modules.setdefault(other, loaded)
            for package, child, loaded in self._below:
                setattr(package, child, loaded)


class Forks:
    """Forks for the orders of several clients, until the last of them has gone."""

    def __init__(self, listener: socket.socket, lock: str) -> None:
        self._listener = listener
        self._lock = lock
        self._clients = 0
        self._selector = selectors.DefaultSelector()

    def serve(self) -> tuple[Order, list[int]]:
        """In a fork, return the order and the standard streams that came with it."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None:
                    self._tell_end(key.fd, *key.data)
                elif (ordered := self._obey(key.fileobj)) is not None:  # type: ignore[arg-type]
                    return ordered

    def leave(self) -> None:
        """In a fork, forget the descriptors, whose numbers others will have."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.detach()
        self._selector.close()

    def _accept(self) -> bool:
        """Take a client if there is one."""
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return False
        client.setblocking(True)
        self._selector.register(client, selectors.EVENT_READ)
        self._clients += 1
        return True

    def _tell_end(self, process: int, pid: int, status: int) -> None:
        self._selector.unregister(process)
        os.close(process)
        end = b"%d" % os.waitpid(pid, 0)[1]
        with suppress(BrokenPipeError):  # its client has gone
            os.write(status, end)
        os.close(status)

    def _obey(self, client: socket.socket) -> tuple[Order, list[int]] | None:
        try:
            data, descriptors, _, _ = socket.recv_fds(client, MAX_ORDER_BYTES, 4)
        except ConnectionResetError:
            data = b""
        if not data:
            self._selector.unregister(client)
            client.close()
            self._clients -= 1
            self._end_without_clients()
            return None
        pid = os.fork()
        if pid == 0:
            return Order(*json.loads(data)), descriptors[:3]
        *streams, status = descriptors
        for stream in streams:
            os.close(stream)
        with suppress(BrokenPipeError):
            client.send(b"%d" % pid)
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
        return None

    def _end_without_clients(self) -> None:
        """Who is about to connect has the lock."""
        if self._clients:
            return
        with open(self._lock, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._accept():
                os._exit(0)


class Background:
    """What ``gpuslice.daemon.background_start`` knows as ``subprocess``: a fork instead of another Python."""

    DEVNULL = subprocess.DEVNULL

    class Popen:
        """In the fork, raise `Executed`; in its parent, be the process."""

        def __init__(
            self,
            command: list[str],
            *,
            stdout: IO[bytes],
            stderr: IO[bytes],
            pass_fds: list[int],
            **_: object,
        ) -> None:
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = os.fork()
            if self.pid:
                return
            os.setsid()
            streams = os.open(os.devnull, os.O_RDONLY), stdout.fileno(), stderr.fileno()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            raise Executed(Order(command, os.getcwd(), dict(os.environ), pass_fds))

        def wait(self) -> int:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def import_commands() -> None:
    """Import what commands and the scheduler do, all but what runs scripts."""
    for package in ("gpuslice.cli", "gpuslice.daemon"):
        for found in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(found.name)
    assert "torch" not in sys.modules
    vars(sys.modules["gpuslice.daemon.background_start"])["subprocess"] = Background


def show(order: Order) -> None:
    """Let other processes read the order's variables in /proc, in place of ROOM and those that were here."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = map(int, fields[47:49])  # proc(5): env_start, env_end
    lines = b"".join(os.fsencode(f"{name}={value}\0") for name, value in order.environ.items())
    ctypes.memmove(begin, lines.ljust(end - begin, b"\0")[: end - begin], end - begin)


def execute(file: str, command: list[str], environ: dict[str, str]) -> None:
    """In place of ``os.execvpe``."""
    assert file == sys.executable, "only another Python can be executed here"
    raise Executed(Order(command, os.getcwd(), environ))


def run(order: Order, path: list[str]) -> None:
    """Do what a Python with this command line does; ``path`` is what its ``sys.path`` ends with."""
    os.chdir(order.directory)
    os.environ.clear()
    os.environ.update(order.environ)
    show(order)
    sys.orig_argv[:] = order.command
    sys.path[:] = [*filter(None, order.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    what, *words = order.command[1:]
    if what == "-m":
        sys.argv = ["-m", *words[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]
        return
    sys.argv = [what, *words]
    sys.path.insert(0, os.path.dirname(os.path.realpath(what)))
    main.__file__ = what
    with open(what, "rb") as file:
        code = compile(file.read(), what, "exec")
    exec(code, vars(main))  # noqa: S102 - as Python does with a script


def close_others(kept: Sequence[int]) -> None:
    """Close all descriptors but the standard streams and ``kept``, as the start of a program does."""
    first = 3
    for descriptor in (*sorted(kept), 1 << 16):
        os.closerange(first, descriptor)
        first = descriptor + 1


class Exit:
    """The end of a fork after its last exit handler, without what Python does then.

    Taking all these modules apart takes longer than most scripts.

    Attributes
    ----------
    status
        The exit code, once it is known; None if Python is to end in its own way, as after an exception: a
        hook for it may still choose another exit code.
    """

    status: int | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.status = 0
        elif isinstance(error, SystemExit):
            code = error.code
            self.status = (code or 0) & 0xFF if isinstance(code, int | None) else 1

    def leave(self) -> None:
        """End here. If something cannot be written, that is Python's to say."""
        if self.status is None:
            return
        with suppress(OSError, ValueError):
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            library = ctypes.PyDLL(None)
            library.fflush(None)
            # exit() would unload all libraries, which takes long. The simulation's then make their account.
            (library.exit if "CUDASIM_LIBRARIES" in os.environ else os._exit)(self.status)


def main() -> None:
    """Serve, and be what was ordered."""
    what, listening, lock = sys.argv[1:]
    listener = socket.socket(fileno=int(listening))
    # A fork that is to begin like the other Pythons of the tests finds it anew.
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder.__module__ != "sitecustomize"]
    own = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = [entry for entry in sys.path if entry not in own]
    shelves: list[Shelf] = []
    end = Exit()
    atexit.register(end.leave)  # before torch registers any
    if what == "torch":
        shelves += [Shelf("torch"), Shelf("torch._dynamo")]
    else:
        import_commands()
    if os.fork():
        os._exit(0)  # a child of the tests' own would be in the way of those that look for children
    forks = Forks(listener, lock)
    order, streams = forks.serve()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    forks.leave()
    close_others(())
    generators: list[Any] = [random]
    if shelves:
        generators += [sys.modules["numpy"].random, sys.modules["torch"].default_generator]
    for generator in generators:
        generator.seed()
    for shelf in shelves:
        shelf.hide()
    os.execvpe = execute  # type: ignore[assignment]
    with end:
        try:
            run(order, path)
        except Executed as executed:
            order = executed.args[0]
        else:
            return
        if shelves:
            for name in [name for name in sys.modules if name.partition(".")[0] == "gpuslice"]:
                del sys.modules[name]
        else:
            close_others(order.descriptors)
        run(order, path)


if __name__ == "__main__":
    main()
