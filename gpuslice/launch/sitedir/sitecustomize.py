"""The sitecustomize of every Python below `gpuslice run`: installs the hooks once torch is imported.

A process that trains gets the hooks. Any other process that imports torch is prepared to become a rank when
it joins a process group. The user's own sitecustomize runs, too. All code here uses the standard library
only, and must not keep a script from running.
"""

from __future__ import annotations

import _thread
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # the real `typing` would cost every Python below us some milliseconds
    from collections.abc import Callable, Mapping, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType
    from typing import Any

#: Launchers: they import torch, but their children train.
LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "torch.distributed.run", "torch.distributed.launch"}
LAUNCHERS |= {"accelerate.commands.launch", "deepspeed.launcher.runner", "deepspeed.launcher.launch"}
#: Beginnings of the code that multiprocessing runs in its children, and in its server, which never trains.
CHILD, RESOURCE_TRACKER = "from multiprocessing.", "from multiprocessing.resource_tracker"
#: Scripts that compile for torch; they never train.
COMPILERS = ("/_inductor/compile_worker/__main__.py", "/_inductor/__autotune_main__.py")
#: Variable with the rank and process that have the hooks. Other ranks train, too, and this one after `exec`.
ARMED = "GPUSLICE_ARMED"


def trains(environ: Mapping[str, str], argv: Sequence[str]) -> bool:
    """Return True if a process with this environment and command line trains."""
    if "GPUSLICE_LAUNCH" not in environ:
        return False
    flag, program = program_of(argv)
    if _compiles(flag, program) or (flag == "c" and program.startswith(CHILD)):
        return False
    if ARMED in environ:
        rank, _, pid = environ[ARMED].partition(" ")
        return rank != environ.get("RANK", rank) or pid == str(os.getpid())
    return not _launches(flag, program)


def may_join(environ: Mapping[str, str], argv: Sequence[str]) -> bool:
    """Return True if this process, which does not train by itself, may still become a rank of the job."""
    flag, program = program_of(argv)
    if "GPUSLICE_LAUNCH" not in environ or _launches(flag, program) or _compiles(flag, program):
        return False
    return not (flag == "c" and program.startswith(RESOURCE_TRACKER))


def program_of(argv: Sequence[str]) -> tuple[str, str]:
    """Return what the interpreter executes: "c" and code, "m" and a module, or "" and a script."""
    words = iter(argv[1:])
    for word in words:
        if word[:1] != "-" or word == "-":
            return "", word
        if word == "--check-hash-based-pycs":
            next(words, "")
        if word[:2] == "--":
            continue
        for end, flag in enumerate(word[1:], 2):  # flags may be joined, also with a value
            if flag in "cmWX":
                value = word[end:] or next(words, "")
                if flag in "cm":
                    return flag, value
                break
    return "", ""


def _launches(flag: str, program: str) -> bool:
    return (program if flag == "m" else os.path.basename(program)) in LAUNCHERS and flag != "c"


def _compiles(flag: str, program: str) -> bool:
    return not flag and program.endswith(COMPILERS)


#: Ray's trainers, of its present and its former interface.
RAY_TRAINERS = ("ray.train.v2.torch.torch_trainer", "ray.train.torch.torch_trainer")


#: Modules with trainers that `gpuslice.frameworks` restarts by their own checkpoints.
TRAINERS = ("transformers.trainer", "lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


class AfterImport:
    """A finder that calls `first` right before a module is imported and `then` after.

    Searching for the module alone does not call them.
    """

    def __init__(self, name: str, then: Callable[[], None], first: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._then = then
        self._first = first
        self._looking = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            _watch(spec, self._first, self._imported)
        return spec

    def _imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then()


def _watch(spec: ModuleSpec, first: Callable[[], None], then: Callable[[], None]) -> None:
    """Make ``first`` run right before the module of ``spec`` is imported, and ``then`` after."""
    assert spec.loader is not None
    spec.loader = _Loader(spec.name, spec.loader, first, then)  # type: ignore[assignment]
    if type(spec) is importlib.machinery.ModuleSpec:
        spec.__class__ = _Spec


class _Spec(importlib.machinery.ModuleSpec):
    """A module's spec that calls ``first`` and ``then`` when ``import`` marks the import's begin and end.

    This leaves no frame of ours below the import, so errors that torch raises have the user's own traceback.
    """

    @property
    def _initializing(self) -> bool:
        return bool(vars(self).get("_initializing"))

    @_initializing.setter
    def _initializing(self, begins: bool) -> None:
        notes: dict[str, Any] = vars(self)
        notes["_initializing"] = begins
        if begins:
            watch = notes["_watch"] = notes["loader"]
            if isinstance(watch, _Loader):  # no other loader has replaced it
                watch.first()
            return
        self.__class__ = importlib.machinery.ModuleSpec  # type: ignore[assignment]
        watch = notes.pop("_watch")
        if isinstance(watch, _Loader) and self.name in sys.modules:  # the import has not failed
            watch.then()


class _Loader:
    """A loader that restores the original loader as soon as it is used."""

    def __init__(
        self, name: str, loader: Loader, first: Callable[[], None], then: Callable[[], None]
    ) -> None:
        self._name = name
        self._loader = loader
        self.first = first
        self.then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    @property
    def exec_module(self) -> Callable[[ModuleType], None]:
        """The original loader's ``exec_module``. Looking it up restores the original loader."""
        module = sys.modules.get(self._name)
        if module is None or not isinstance(module.__spec__, _Spec) or not module.__spec__._initializing:
            return self._execute
        self._restore_loader(module)
        return self._loader.exec_module

    def _execute(self, module: ModuleType) -> None:
        """Run the module for code that does not import by ``import``, such as `importlib.util.LazyLoader`."""
        self._restore_loader(module)
        if isinstance(module.__spec__, _Spec):
            module.__spec__.__class__ = importlib.machinery.ModuleSpec  # type: ignore[assignment]
        self.first()
        self._loader.exec_module(module)
        self.then()

    def _restore_loader(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader


class EarlyThreads:
    """Threads that start before torch is imported. Each enters the gate by itself, once there is one.

    The gate's hook into a thread's torch operations must be set from within that thread. Until then, this
    object is their profile function: Python calls it whenever such a thread calls a function or returns.
    """

    def __init__(self) -> None:
        #: Threads that have not entered yet.
        self.idents: set[int] = set()
        self._enter: Callable[[], None] | None = None

    def watch(self) -> None:
        """Record every ``threading.Thread`` that starts from now on."""
        import threading

        threading.setprofile(self)

    def admit(self, enter: Callable[[], None]) -> None:
        """Make each recorded thread call ``enter`` before anything else. Later threads are not recorded."""
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


#: Variable with the ABI of gpuslice's environment, and NAME=PATH of the packages that it needs from there.
PACKAGES = "GPUSLICE_PACKAGES"
#: The oldest torch that gpuslice works with.
OLDEST_TORCH = (2, 6)


class PackagePaths:
    """A finder of last resort for gpuslice and its dependencies, in the environment that has them."""

    def __init__(self, text: str) -> None:
        suffix, *places = text.split(os.pathsep)
        self.fits = suffix in ("", importlib.machinery.EXTENSION_SUFFIXES[0])
        self._places: dict[str, str] = {}
        for place in places if self.fits else ():
            name, _, where = place.partition("=")
            self._places[name] = where

    def needed(self) -> bool:
        """Return True if this environment lacks one of the packages, or if they do not fit this Python."""
        return not self.fits or not all(map(_is_there, self._places))

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        place = self._places.get(name)
        if place is None:
            return None
        if place.endswith(".py"):
            return importlib.util.spec_from_file_location(name, place)
        inside = os.path.join(place, "__init__.py")
        return importlib.util.spec_from_file_location(name, inside, submodule_search_locations=[place])


def _is_there(name: str) -> bool:
    """Return True if a top-level package can be imported here."""
    return any(finder.find_spec(name, None) is not None for finder in sys.meta_path)


def why_out_of_reach(error: ImportError) -> str:
    """Return why gpuslice or one of its dependencies cannot be imported in this environment."""
    for finder in sys.meta_path:
        if isinstance(finder, PackagePaths) and not finder.fits:
            return f"it has Python {sys.version_info[0]}.{sys.version_info[1]}, gpuslice is there for another"
    return str(error)


def check_torch(version: str) -> None:
    """Raise if ``version`` is of a torch that gpuslice does not work with.

    Raises
    ------
    ImportError
        If it is too old. The error names the version.
    """
    numbers = [int(number) for number in version.split(".")[:2] if number.isdecimal()]
    if len(numbers) == 2 and (numbers[0], numbers[1]) < OLDEST_TORCH:
        raise ImportError(f"its torch {version} is older than {'.'.join(map(str, OLDEST_TORCH))}")


class MainThreadCalls:
    """The handler of a signal by which another thread makes the main thread run a function.

    Only the main thread can install the handler, and torch may be imported in another one.
    """

    def __init__(self) -> None:
        #: The function to call with the main thread's frame, once gpuslice is imported.
        self.gpuslice_answer: Callable[[FrameType | None], None] | None = None

    def watch(self) -> None:
        import _signal  # type: ignore[import-not-found]  # `signal` takes some milliseconds

        if _signal.getsignal(_signal.SIGURG) == _signal.SIG_DFL:
            _signal.signal(_signal.SIGURG, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.gpuslice_answer is not None:
            self.gpuslice_answer(frame)


def load_shim() -> None:
    """Load the vmm route's memory shim, if that is the job's route. This has to happen before torch loads."""
    if os.environ.get("GPUSLICE_ROUTE") != "vmm":
        return
    try:
        from gpuslice.errors import GpusliceError
        from gpuslice.kernels.vmm import shim
    except ImportError:
        return  # reported once torch is imported
    try:
        shim.preload()
    except GpusliceError as error:
        _say(error.lines)
        raise SystemExit(error.exit_code) from None


def wait_if_ahead() -> None:
    """Wait if this process was started before its turn and its script is not to run yet."""
    if "GPUSLICE_GATE" in os.environ:
        importlib.import_module("gpuslice.agent.start_ahead").begin(*program_of(sys.orig_argv))


def install_hooks(early: EarlyThreads | None = None) -> None:
    """Install the hooks. If that fails, report it and go on, unless the user asked for suspends."""
    os.environ[ARMED] = f"{os.environ.get('RANK', '')} {os.getpid()}"
    _install_or_warn(lambda: importlib.import_module("gpuslice.hooks.installation").install(early))


def change_trainer(name: str) -> None:
    """Make Ray's trainer in module ``name`` call the training function in this process, which is a rank."""
    _install_or_warn(lambda: importlib.import_module("gpuslice.hooks.ray_trainer").install(name))


def restart_trainer(name: str) -> None:
    """Make the trainer in module ``name`` go on from the job's newest snapshot."""
    _install_or_warn(lambda: importlib.import_module("gpuslice.frameworks.adapters").install(name))


def prepare_candidate() -> None:
    """Prepare this process to notice that it becomes a rank."""
    _install_or_warn(lambda: importlib.import_module("gpuslice.hooks.candidates").prepare())


def _install_or_warn(install: Callable[[], None]) -> None:
    try:
        check_torch(str(getattr(sys.modules["torch"], "__version__", "")))
        install()
    except ImportError as error:
        remedy = f"install it there: {sys.executable} -m pip install gpuslice"
        _refuse(f"{remedy} ({why_out_of_reach(error)})")
    except Exception as error:  # noqa: BLE001 - whatever is wrong with us, it must not break `import torch`
        _refuse(f"{type(error).__name__}: {error}")


def _refuse(why: str) -> None:
    """Report that there are no hooks, and why. End the script if the user asked for suspends."""
    _say(f"gpuslice: no hooks in this process: {why}\n")
    wanted = ("GPUSLICE_SUSPEND_EVERY", "GPUSLICE_SUSPEND_AT", "GPUSLICE_SOCKET")
    if any(os.environ.get(name, "") not in ("", "0") for name in wanted):
        raise SystemExit(3) from None


def _say(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(text)


def run_user_sitecustomize() -> None:
    """Run the user's sitecustomize, which this one hides, as if Python had found it first."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        # `site` expects this error if there is none, and goes on silently.
        raise ImportError("no sitecustomize of the user's own", name="sitecustomize")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    packages = PackagePaths(os.environ.get(PACKAGES, ""))
    if packages.needed():
        sys.meta_path.append(packages)
    if trains(os.environ, sys.orig_argv):
        wait_if_ahead()
        early_threads = EarlyThreads()
        early_threads.watch()
        MainThreadCalls().watch()
        sys.meta_path.insert(0, AfterImport("torch", lambda: install_hooks(early_threads), load_shim))
        for trainer in RAY_TRAINERS:
            sys.meta_path.insert(0, AfterImport(trainer, functools.partial(change_trainer, trainer)))
        for trainer in TRAINERS if os.environ.get("GPUSLICE_JOB") else ():
            sys.meta_path.insert(0, AfterImport(trainer, functools.partial(restart_trainer, trainer)))
    elif may_join(os.environ, sys.orig_argv):
        MainThreadCalls().watch()
        sys.meta_path.insert(0, AfterImport("torch", prepare_candidate, load_shim))
    run_user_sitecustomize()
