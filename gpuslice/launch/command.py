"""The user's command of ``gpuslice run``: its check, environment and execution, with hooks on PYTHONPATH."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from gpuslice.config import Settings, variable
from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.files import check_working_directory, draft_path
from gpuslice.launch.device_choice import HOST, named_device
from gpuslice.launch.job_names import expand
from gpuslice.launch.rank_identity import ARMED as ARMED
from gpuslice.types import DeviceName, Route, job_id

if TYPE_CHECKING:
    from gpuslice.checkpoint.ramdisk.listing import StoreInfo

SITEDIR = Path(__file__).resolve().parent / "sitedir"
#: Variable set by the launcher. Pythons below it then check whether they train.
LAUNCH = "GPUSLICE_LAUNCH"
#: Variable with the paths of gpuslice's packages, for interpreters in environments without it.
PACKAGES = "GPUSLICEPACKAGES"
#: Variable with the Python that has launched the job: on another node its own takes that place.
PYTHON = "GPUSLICE_PYTHON"
#: The packages of gpuslice, and those that it imports in a process that trains.
_NEEDED = (
    *("gpuslice", "gpuslice.checkpoint", "gpuslice.kernels", "gpuslice.profiler", "gpuslice.sched_core"),
    *("msgspec", "numpy", "psutil", "pynvml", "xxhash", "zmq"),
)


def command_line(words: Sequence[str]) -> list[str]:
    """Return the command for ``script.py args``, ``-m module args`` or ``-- command args``.

    Raises
    ------
    UsageError
        If there is nothing to run, or the script or command does not exist.
    """
    if not words:
        raise UsageError("nothing to run", "give a script, -m module, or -- and a command")
    first, rest = words[0], list(words[1:])
    if first in ("-m", "--") and not rest:
        missing = "module" if first == "-m" else "command"
        raise UsageError(f"{first} without a {missing}", f"name the {missing} after it")
    if first == "-m":
        return [sys.executable, "-m", *rest]
    if first == "--":
        if shutil.which(rest[0]) is None:
            raise UsageError(f"there is no command {rest[0]!r}", "check the name and PATH")
        return rest
    if first.startswith("-"):
        raise UsageError(f"unknown option {first}", "see --help; the script's own options follow its name")
    if not os.path.exists(first):
        if not os.path.isabs(first):
            check_working_directory()
        raise UsageError(
            f"there is no script {first!r}", "check the path; to run another command, write -- before it"
        )
    if os.path.isdir(first) and not os.path.exists(os.path.join(first, "__main__.py")):
        raise UsageError(f"{first!r} is a directory without a __main__.py", "name the script in it")
    return [sys.executable, first, *rest]


def check(settings: Settings, *, inputs: Iterable[Path] = ()) -> Settings:
    """Raise if the settings cannot work. Return them with absolute paths.

    These are cheap checks without importing torch. The job itself checks more when it starts.

    Parameters
    ----------
    inputs
        Files that are run or read. No output may overwrite them.

    Raises
    ------
    UsageError
        For a contradiction or an impossible value.
    EnvironmentUnusableError
        If this machine has no such device, or the route cannot be taken on it.
    """
    if settings.suspend_every and settings.suspend_at:
        raise UsageError("both --suspend-every and --suspend-at are given", "choose one of the two")
    if settings.memory and not settings.device:
        raise UsageError(
            "--memory limits what is allocated on a device, and none is named", "name it: --device cpu"
        )
    if settings.fresh and settings.continue_anyway:
        raise UsageError("both --fresh and --continue-anyway are given", "choose one of the two")
    if settings.job:
        job_id(settings.job)
    route = Route(settings.route)
    device = named_device(settings.device, route) or HOST
    check_driver_is_loaded(settings, device)
    # Late: most users of this module run no job.
    from gpuslice.kernels.host.slots import check_slot
    from gpuslice.kernels.routes import choose

    check_slot(device, settings.cpu_slots)
    choose(route, device)
    paths = {
        name: os.path.abspath(getattr(settings, name))
        for name in ("report", "profile", "ramdisk_dir", "spill_dir")
        if getattr(settings, name)
    }
    if "report" in paths:
        paths["report"] = os.path.realpath(paths["report"])
        check_outputs({"--report": Path(paths["report"])}, inputs=inputs)
    return msgspec.structs.replace(settings, **paths)


def with_route(settings: Settings, words: Sequence[str]) -> Settings:
    """Return the settings, with the vmm route for ``auto`` if the script records CUDA graphs.

    The settings change only if that route works here and the GPU is certain: named, or the only one.
    """
    if settings.route != Route.AUTO.value:
        return settings
    from gpuslice.launch.graph_use import find_graph_use

    where = find_graph_use(words)
    if not where or (settings.device and not settings.device.startswith("cuda")):
        return settings
    from gpuslice.kernels.routes import Ground, verdicts
    from gpuslice.launch.visible_gpus import visible

    ground = Ground.here()
    certain = bool(settings.device) or len(visible(ground.driver.gpus, os.environ)) == 1
    if not certain or not verdicts("cuda", ground)[Route.VMM].available:
        return settings
    sys.stderr.write(f"gpuslice: {where} records CUDA graphs, so its route is vmm\n")
    return msgspec.structs.replace(settings, route=Route.VMM.value)


def check_driver_is_loaded(settings: Settings, device: DeviceName) -> None:
    """Raise if ``device`` is a GPU and no NVIDIA driver is loaded.

    Raises
    ------
    EnvironmentUnusableError
        The error names the option that asked for the GPU.
    """
    if device.kind == "cuda" and not _has_nvidia_driver():
        asked, instead = f"--route {settings.route}", "--route tensor"
        if settings.device:
            asked, instead = str(device), "the device cpu"
        raise EnvironmentUnusableError(
            f"{asked} needs an NVIDIA driver, and none is loaded", f"use {instead} or see `gpuslice doctor`"
        )


def environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the settings and the hooks, for the command and all that it starts."""
    names = {variable(field) for field in Settings.__struct_fields__} | {ARMED}
    result = {name: value for name, value in environ.items() if name not in names}
    result |= settings.environ()
    result[LAUNCH] = str(os.getpid())
    result[PACKAGES] = package_paths()
    result[PYTHON] = sys.executable
    path = environ.get("PYTHONPATH")
    result["PYTHONPATH"] = f"{SITEDIR}{os.pathsep}{path}" if path else str(SITEDIR)
    return result


def package_paths() -> str:
    """Return the text of ``GPUSLICEPACKAGES``: suffix of compiled modules, then NAME=PATH per package."""
    found = [EXTENSION_SUFFIXES[0]]
    for name in _NEEDED:
        spec = find_spec(name)
        if spec is not None:
            places = spec.submodule_search_locations
            found.append(f"{name}={next(iter(places)) if places else spec.origin}")
    return os.pathsep.join(found)


def execute(words: Sequence[str], settings: Settings) -> NoReturn:
    """Replace this process by the user's command.

    No process of gpuslice stays around the command: ``__main__``, ``sys.argv``, signals, exit code, stdout
    and tracebacks are its own.
    """
    command = command_line(words)
    settings = msgspec.structs.replace(settings, job=expand(settings.job, words), command=fingerprint(words))
    settings = begin_anew(check(with_route(settings, words), inputs=map(Path, command)))
    variables = environment(settings, os.environ)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        os.execvpe(command[0], command, variables)
    except OSError as error:
        raise UsageError(f"cannot execute {command[0]}: {error.strerror}", "check the command") from error


def fingerprint(words: Sequence[str]) -> str:
    """Return a short hash of a command. Equal commands have equal hashes."""
    return blake2b("\0".join(words).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def begin_anew(settings: Settings) -> Settings:
    """Remove the snapshots of a named job if ``fresh`` is set. Return the settings, with ``fresh`` then off.

    If the script itself names its job later, the job's process removes them.

    Raises
    ------
    UsageError
        If the job is running.
    """
    if not (settings.fresh and settings.job):
        return settings
    from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk

    removed = RamDisk.from_settings(settings).aside.forget(settings.job)
    sys.stderr.write(f"gpuslice: {begun_anew(settings.job, removed)}\n")
    return msgspec.structs.replace(settings, fresh=False)


def begun_anew(job: str, removed: Sequence[StoreInfo]) -> str:
    """Return the message about the snapshots that were removed so that a job begins anew."""
    found = [f"boundary {info.boundary}" for info in removed if info.restartable]
    return f"job {job} begins anew; removed: {', '.join(found) or 'nothing, there was no snapshot'}"


def check_outputs(
    outputs: Mapping[str, Path | None], *, inputs: Iterable[Path | None] = (), devices: bool = False
) -> None:
    """Raise if an output file cannot be written (`check_writable`) or would overwrite another file.

    The latter is a file that is also read, or that two options name.

    Parameters
    ----------
    outputs
        Output files by option; ``None`` for those not wanted.
    inputs
        Files that are read; ``None`` for those not given.
    devices
        True to accept any path that is no directory, such as ``/dev/stdout``.

    Raises
    ------
    UsageError
        The error names the option.
    """
    taken = {os.path.realpath(path): "what is read" for path in inputs if path is not None}
    for option, path in outputs.items():
        if path is None or (devices and path.exists() and not (path.is_file() or path.is_dir())):
            continue
        check_writable(option, str(path.absolute()))
        if (other := taken.setdefault(os.path.realpath(path), option)) != option:
            raise UsageError(f"{option} {path} would overwrite {other}", "name another file")


def check_writable(option: str, path: str) -> None:
    """Raise if a file cannot be written, by creating a draft beside it.

    Raises
    ------
    UsageError
        The error names the option.
    """
    directory = os.path.dirname(path)
    if not os.path.isdir(directory):
        raise UsageError(f"the directory of {path} does not exist", "make it")
    if os.path.isdir(path):
        raise UsageError(f"{option} {path} is a directory", "name a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"{option} {path} is not a regular file", "name a file")
    try:
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise PermissionError
        # Some file systems look writable and are not.
        draft = draft_path(Path(path))
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW))
        draft.unlink()
    except OSError as error:
        message = f"{option} {path} cannot be written"
        raise UsageError(message, "choose a file in a directory of yours") from error


def rank_path(path: Path, rank: int) -> Path:
    """Return the file of a rank's report: ``FILE.json`` for rank 0, ``FILE.rank1.json`` for rank 1."""
    return path if rank == 0 else path.with_suffix(f".rank{rank}{path.suffix}")


def _has_nvidia_driver() -> bool:
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version"))
