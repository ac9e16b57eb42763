"""All that needs a GPU, in one command: ``python benchmarks/gpu_suite/run.py --out DIR`` (README.md).

Standard library only, so that it can say what is missing before anything else does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from steps import ROOT, Runner, link_tree

#: Import name -> what is lost without it.
NEEDED = {
    "torch": "everything",
    "numpy": "everything",
    "msgspec": "everything",
    "xxhash": "everything: checksums",
    "zmq": "everything that runs a job",
    "psutil": "everything that runs a job",
    "pynvml": "everything (package nvidia-ml-py)",
    "typer": "the command line",
    "rich": "the command line",
    "pytest": "the tests",
    "hypothesis": "the tests of files and messages",
    "safetensors": "the tests of exported snapshots",
    "pytest_benchmark": "the tests' options (package pytest-benchmark)",
    "cupy": "the GPU kernels (package cupy-cuda12x or cupy-cuda13x)",
}
#: Without these nothing can run at all.
ESSENTIAL = ("torch", "numpy", "msgspec", "xxhash", "zmq", "psutil", "pynvml", "typer", "rich")
RIVALS = ("to-cpu", "torch-save", "memory-saver", "memory-saver-retained")
GB = 10**9
#: For all steps together, on a real GPU.
LIMIT_S = 540.0
SUITE = "benchmarks.gpu_suite"


def missing() -> dict[str, str]:
    """Packages that cannot be imported here, with what is lost."""
    return {name: loss for name, loss in NEEDED.items() if importlib.util.find_spec(name) is None}


class Suite:
    """The steps in the order of what would be missed most if the time were over.

    Parameters
    ----------
    scale
        Of all sizes; 1 on a real GPU.
    """

    def __init__(self, runner: Runner, out: Path, device: str, scale: float) -> None:
        self._runner, self._out, self._device = runner, out, device
        self._scale = scale

    def run(self) -> None:
        if self._environment() != 0:
            return  # whatever else could only fail for the same reason
        self._runner.run(
            "self-test", ["-m", "gpuslice", "doctor", "--json", "--check"], output="doctor.json", limit_s=60
        )
        self._copies(4)
        self._module("threshold", "threshold", "--count", str(self._number(500)), limit_s=90)
        self._copies(16, "large")
        self._module("swap", "swap", "--bytes", str(self._number(4 * GB)), limit_s=90)
        for rival in RIVALS:
            self._rival(rival)
        self._tests("tests", "gpu and not whole_gpu", at_once=6)
        self._module("repros", "repros", limit_s=120, on_device=False)
        self._module("trainings", "trainings", limit_s=120, on_device=False)
        self._tests("tests_alone", "gpu and whole_gpu")
        self._rival("driver")

    def _environment(self) -> int | None:
        out = str(self._out / "environment.json")
        words = ["-m", f"{SUITE}.environment", self._device, out]
        return self._runner.run("environment", words, output="environment.log", limit_s=60).exit_code

    def _number(self, full: int) -> int:
        return max(4, int(full * self._scale))

    def _copies(self, size_gb: int, *kinds: str) -> None:
        words = ["--bytes", str(self._number(size_gb * GB)), *(["--kinds", *kinds] if kinds else [])]
        self._module(f"copies_{size_gb}gb", "copy_phase", *words, limit_s=60 + 5 * size_gb)

    def _module(self, name: str, module: str, *words: str, limit_s: float, on_device: bool = True) -> None:
        place = ["--device", self._device] if on_device else []
        out = ["--out", str(self._out / f"{name}.json")]
        words = ("-m", f"{SUITE}.{module}", *out, *place, *words)
        self._runner.run(name, words, output=f"{name}.log", limit_s=limit_s)

    def _tests(self, name: str, which: str, at_once: int = 1) -> None:
        """Of the files with tests marked ``gpu``, and the simulation's: others would only take time."""
        tests = sorted((ROOT / "tests").rglob("test_*.py"))
        files = [path for path in tests if "mark.gpu" in path.read_text(encoding="utf-8")]
        words = ["-m", "pytest", "-c", "pyproject.toml", "-ra", "-p", "no:cacheprovider", "-m", which]
        if at_once > 1 and importlib.util.find_spec("xdist") is not None:
            words += ["-n", str(at_once)]
        words += [
            "--continue-on-collection-errors",
            f"--junitxml={self._out / f'{name}.xml'}",
            "tests/cudasim",
        ]
        words += [str(path.relative_to(ROOT)) for path in files]
        environ = {"CUDASIM_ON_A_GPU": "1"}
        self._runner.run(name, words, output=f"{name}.log", limit_s=240, environ=environ)

    def _rival(self, name: str) -> None:
        nbytes = str(self._number(4 * GB))
        words = ["-m", f"{SUITE}.rivals", name, self._device, nbytes]
        self._runner.run(f"rival {name}", words, output=f"rival_{name}.json", limit_s=60)


def is_simulated(out: Path) -> bool:
    """As the first step found it."""
    path = out / "environment.json"
    return path.exists() and bool(json.loads(path.read_text(encoding="utf-8"))["simulated"])


def output_directory(path: Path) -> Path:
    """Made, and empty: no result of an earlier run must be taken for one of this."""
    path = path.resolve()
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise SystemExit(f"{path} is not empty; name a new directory")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the results, empty or new")
    parser.add_argument("--device", default="cuda:0", help="what to measure on")
    limits = "for all steps together; each step has the more, too"
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help=limits)
    parser.add_argument("--scale", type=float, default=1, help="of all sizes; to try the suite itself")
    arguments = parser.parse_args()
    lost = missing()
    for name, loss in lost.items():
        print(f"missing: {name}; without it goes {loss}", flush=True)
    if any(name in lost for name in ESSENTIAL):
        print("stopped: see README.md for how to bring these packages along", file=sys.stderr)
        return 3
    out = output_directory(arguments.out)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running step is ended, too
    with tempfile.TemporaryDirectory(prefix="gpuslice-suite-") as directory:
        tree, patience = link_tree(Path(directory) / "tree"), max(1.0, arguments.limit / LIMIT_S)
        runner = Runner(tree, out, arguments.limit, patience)
        Suite(runner, out, arguments.device, arguments.scale).run()
    summary = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "device": arguments.device,
        "scale": arguments.scale,
        "simulated": is_simulated(out),
        "missing": lost,
        "steps": [asdict(step) for step in runner.steps],
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return int(any(step.failed for step in runner.steps))


if __name__ == "__main__":
    sys.exit(main())
