"""Run by every Python that `gpuslice run` starts: gives way to the user's own, then waits for torch.

Only the process that trains gets the hooks: not a launcher's agent, not what a training process forks or
spawns. Everything here is standard library, and nothing here may keep a script from running.
"""

from __future__ import annotations

import _thread
import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # the real `typing` would cost every Python below us some milliseconds
    from collections.abc import Callable, Mapping, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

#: Launchers: they import torch, but their children train.
LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "torch.distributed.run", "torch.distributed.launch"}
LAUNCHERS |= {"accelerate.commands.launch", "deepspeed.launcher.runner", "deepspeed.launcher.launch"}
#: Arguments of helper processes: multiprocessing's children and servers, inductor's compile workers.
HELPERS = ("--multiprocessing-fork", "multiprocessing.", "compile_worker")
#: Which rank has the hooks, for the processes below it; a process of another rank trains, too.
ARMED = "GPUSLICE_ARMED"


def trains(environ: Mapping[str, str], argv: Sequence[str]) -> bool:
    """Whether a process with this environment and command line is one that trains."""
    if "GPUSLICE_LAUNCH" not in environ:
        return False
    if any(helper in argument for argument in argv[1:] for helper in HELPERS):
        return False
    if ARMED in environ:
        return environ[ARMED] != environ.get("RANK", "")
    program = argv[argv.index("-m") + 1 :] if "-m" in argv[:-1] else argv[1:]
    return os.path.basename(next((word for word in program if word[:1] != "-"), "")) not in LAUNCHERS


class AfterTorch:
    """A finder that calls `first` right before torch is imported and `then` after.

    Looking torch up is not importing it.
    """

    def __init__(self, then: Callable[[], None], first: Callable[[], None]) -> None:
        self._then = then
        self._first = first
        self._looking = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torch" or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported, self._first)  # type: ignore[assignment]
        return spec

    def _imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then()


class _Loader:
    def __init__(self, loader: Loader, then: Callable[[], None], first: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then
        self._first = first

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._first()
        self._loader.exec_module(module)
        self._then()


class EarlyThreads:
    """Threads that start before torch is imported: once there is a gate, each enters it by itself.

    What makes a thread's torch operations pass the gate has to be set from within that thread. So this is
    their profile function until then: Python calls it whenever such a thread calls something or returns.
    """

    def __init__(self) -> None:
        #: Those that have not entered yet.
        self.idents: set[int] = set()
        self._enter: Callable[[], None] | None = None

    def watch(self) -> None:
        """Notice every ``threading.Thread`` that starts from now on."""
        import threading

        threading.setprofile(self)

    def admit(self, enter: Callable[[], None]) -> None:
        """Let each call ``enter`` before it does anything else; later threads are not ours."""
        import threading

        self._enter = enter
        if threading.getprofile() is self:
            threading.setprofile(None)

    def __call__(self, frame: object, event: str, argument: object) -> None:
        ident = _thread.get_ident()
        if self._enter is None:
            self.idents.add(ident)
            return
        sys.setprofile(None)
        self._enter()
        self.idents.discard(ident)


def load_shim() -> None:
    """Put the vmm route's memory shim under torch, if that is the job's route; it must come before torch."""
    if os.environ.get("GPUSLICE_ROUTE") != "vmm":
        return
    from gpuslice.errors import GpusliceError
    from gpuslice.kernels import vmm

    try:
        vmm.preload()
    except GpusliceError as error:
        sys.stderr.write(f"gpuslice: {error.message}\ngpuslice: {error.remedy}\n")
        raise SystemExit(error.exit_code) from None


def install_hooks(early: EarlyThreads | None = None) -> None:
    """Install the hooks; if that fails, say so, and go on without unless the user asked for suspends."""
    os.environ[ARMED] = os.environ.get("RANK", "")
    try:
        from gpuslice import hooks

        hooks.install(early)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with us, it must not break `import torch`
        sys.stderr.write(f"gpuslice: no hooks in this process: {type(error).__name__}: {error}\n")
        wanted = ("GPUSLICE_SUSPEND_EVERY", "GPUSLICE_SUSPEND_AT", "GPUSLICE_SOCKET")
        if any(os.environ.get(name, "") not in ("", "0") for name in wanted):
            raise SystemExit(3) from None


def users_own() -> None:
    """Run the sitecustomize that this one hides, as if it had been found in the first place."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        # What `site` expects where there is none: it goes on silently, and no module remains.
        raise ImportError("no sitecustomize of the user's own", name="sitecustomize")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if trains(os.environ, sys.orig_argv):
        early_threads = EarlyThreads()
        early_threads.watch()
        sys.meta_path.insert(0, AfterTorch(lambda: install_hooks(early_threads), load_shim))
    users_own()
