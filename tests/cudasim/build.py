"""``python tests/cudasim/build.py FOLDER``: build the simulated CUDA libraries and put them in place.

To be run by the Python of an environment of its own, `./x test-cuda` makes it: there torch's libraries find
the simulated runtime where the real one was. Nothing outside of that environment changes.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
NATIVE = HERE / "native"
CORE = ("settings", "account", "faults", "memory", "hostlocks", "streams", "copies", "graphs", "checkpoint")
API = ("runtime", "runtime_graphs")
DRIVER = ("driver", "driver_memory", "driver_checkpoint")
OPERATORS = ("operators_memory", "operators_recurrent", "operators")
FLAGS = ("-std=c++20", "-fPIC", "-shared", "-pthread")
#: torch loads the simulation at the end of its import because of this.
ENTRY_POINTS = "[torch.backends]\ncudasim = cudasim:load\n"


def main(folder: Path) -> None:
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        sys.exit("build.py: this Python has no torch")
    packages = Path(torch.origin).parents[1]
    if not packages.is_relative_to(sys.prefix):
        sys.exit(f"build.py: the torch in {packages} is not this environment's own; run `./x test-cuda`")
    folder.mkdir(exist_ok=True)
    stamp, state = folder / "stamp", _state(packages)
    if not stamp.exists() or stamp.read_text() != state:
        stamp.unlink(missing_ok=True)
        _build(packages, folder)
        stamp.write_text(state)
    _replace(packages / "nvidia" / "cu13" / "lib" / "libcudart.so.13", folder)
    _replace(packages / "nvidia" / "nccl" / "lib" / "libnccl.so.2", folder)
    _enter(folder)


def _state(packages: Path) -> str:
    digest = hashlib.sha256((packages / "torch" / "version.py").read_bytes())
    for path in sorted([*NATIVE.iterdir(), Path(__file__)]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _build(packages: Path, folder: Path) -> None:
    """The operators take half a minute of CPU time, so the rest is built beside them."""
    print("build.py: building the simulated CUDA libraries", file=sys.stderr)
    runtime = folder / "libcudart.so.13"
    (folder / "cudart.map").write_text("libcudart.so.13 { global: *; };\n")
    include = packages / "nvidia" / "cu13" / "include"
    rpath = "-Wl,-rpath,$ORIGIN"
    version = f"-Wl,--version-script,{folder / 'cudart.map'}"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(_compile, runtime, _sources(*CORE, *API), "-O2", f"-I{include}", version, "-ldl")
        files = pool.submit(_compile, folder / "libcudasim_files.so", _sources("device_files"), "-O2", "-ldl")
        first.result()
        operators = pool.submit(_build_operators, packages, folder, str(runtime), rpath)
        _compile(folder / "libcuda.so.1", _sources(*DRIVER), "-O2", str(runtime), rpath)
        _compile(folder / "libnvidia-ml.so.1", _sources("nvml"), "-O2", str(runtime), rpath)
        headers = [f"-I{include}", f"-I{packages / 'nvidia' / 'nccl' / 'include'}"]
        _compile(folder / "libnccl.so.2", _sources("nccl"), "-O2", *headers, str(runtime), rpath)
        files.result()
        operators.result()


def _build_operators(packages: Path, folder: Path, *libraries: str) -> None:
    """As one translation unit: PyTorch's headers take most of the time."""
    torch = packages / "torch"
    unit = folder / "operators.cpp"
    unit.write_text("".join(f'#include "{path}"\n' for path in _sources(*OPERATORS)))
    headers = [torch / "include", torch / "include/torch/csrc/api/include"]
    headers += [packages / "nvidia/cu13/include", packages / "nvidia/cu13/include/cccl"]
    options = ["-O1", "-w", "-DUSE_CUDA", *(f"-isystem{path}" for path in headers)]
    links = [
        f"-L{torch / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        "-lc10_cuda",
        "-ltorch_cuda",
        f"-Wl,-rpath,{torch / 'lib'}",
    ]
    _compile(folder / "libcudasim_operators.so", [unit], *options, *links, *libraries)


def _sources(*names: str) -> list[Path]:
    return [NATIVE / f"{name}.cpp" for name in names]


def _compile(target: Path, sources: list[Path], *options: str) -> None:
    command = ["g++", *FLAGS, "-Wall", "-Wextra", "-o", str(target), *map(str, sources), *options]
    command.append(f"-Wl,-soname,{target.name}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"build.py: {target.name} cannot be built:\n{done.stderr}")


def _replace(library: Path, folder: Path) -> None:
    """Not preloaded: then a runtime would come before the memory shim of the vmm route, too."""
    if not library.is_symlink():
        library.rename(library.with_name(f"{library.name}.real"))
    library.unlink(missing_ok=True)
    library.symlink_to(folder.resolve() / library.name)


def _enter(folder: Path) -> None:
    """Have every Python of this environment find ``cudasim``, its CuPy, and the entry point."""
    info = folder / "entry" / "cudasim-0.dist-info"
    shutil.rmtree(info, ignore_errors=True)
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cudasim\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    site = Path(sysconfig.get_path("purelib"))
    (site / "cudasim.pth").write_text(f"{HERE / 'site'}\n{info.parent.resolve()}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
