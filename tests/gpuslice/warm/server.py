"""A Python that has imported torch already; asked for a command, it forks and becomes that.

Run with the descriptor of a socket, over which `process.py` sends orders. Importing torch, and what it
imports when an optimizer is made, takes seconds; most scripts of the tests take a fraction of one. What a
fork runs sees nothing of it: the modules are taken out of ``sys.modules`` and come back when they are
imported, so whoever waits for ``import torch`` is told in time.

Not as in a Python of its own are the frames below a script in a traceback, the interpreter's options, the
seed of ``hash``, which all forks of one server share, and that torch is not taken apart after the last exit
handler.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import site
import socket
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NamedTuple

MAX_ORDER_BYTES = 1 << 17


class Order(NamedTuple):
    """A command, and where it runs."""

    command: list[str]
    directory: str
    environ: dict[str, str]


class Executed(BaseException):
    """Somebody has called ``os.execvpe``: with this order."""


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


def serve(orders: socket.socket) -> tuple[Order, list[int]]:
    """Fork for each order; in the fork, return the order and the standard streams that came with it.

    Ends this process when nobody is left to give orders.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not orders:
                    pid, status = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    os.write(status, b"%d" % os.waitpid(pid, 0)[1])
                    os.close(status)
                    continue
                data, descriptors, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 4)
                if not data:
                    os._exit(0)
                pid = os.fork()
                if pid == 0:
                    return Order(*json.loads(data)), descriptors[:3]
                *streams, status = descriptors
                for stream in streams:
                    os.close(stream)
                orders.send(b"%d" % pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))


def execute(file: str, command: list[str], environ: dict[str, str]) -> None:
    """In place of ``os.execvpe``."""
    assert file == sys.executable, "only another Python can be executed here"
    raise Executed(Order(command, os.getcwd(), environ))


def run(order: Order, path: list[str]) -> None:
    """Do what a Python with this command line does; ``path`` is what its ``sys.path`` ends with."""
    os.chdir(order.directory)
    os.environ.clear()
    os.environ.update(order.environ)
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


def leave(shelves: list[Shelf]) -> None:
    """The last exit handler: taking all these modules apart would take longer than most scripts."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(shelves))
    gc.freeze()
    for shelf in shelves:
        shelf.hide()


def main() -> None:
    """Serve, and be what was ordered."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    own = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = [entry for entry in sys.path if entry not in own]
    shelves: list[Shelf] = []
    atexit.register(leave, shelves)  # before torch registers any
    shelves += [Shelf("torch"), Shelf("torch._dynamo")]
    if os.fork():
        os._exit(0)  # a child of the tests' own would be in the way of those that look for children
    order, streams = serve(orders)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    orders.detach()
    os.closerange(3, 1 << 16)
    for generator in (random, sys.modules["numpy"].random, sys.modules["torch"].default_generator):
        generator.seed()
    for shelf in shelves:
        shelf.hide()
    os.execvpe = execute  # type: ignore[assignment]
    try:
        run(order, path)
    except Executed as executed:
        order = executed.args[0]
    else:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "gpuslice"]:
        del sys.modules[name]
    run(order, path)


if __name__ == "__main__":
    main()
