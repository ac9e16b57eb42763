"""All that needs a GPU, in one command: ``python benchmarks/gpu_suite/run.py --out DIR`` (README.md).

Standard library only, so that it can say what is missing before anything else does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Import name -> what is lost without it.
NEEDED = {
    "torch": "everything",
    "numpy": "everything",
    "pytest": "everything",
    "msgspec": "everything",
    "xxhash": "everything: checksums",
    "zmq": "everything that runs a job",
    "psutil": "everything that runs a job",
    "typer": "the command line",
    "rich": "the command line",
    "pynvml": "gpuslice doctor (package nvidia-ml-py)",
    "numba": "the simulator",
    "hypothesis": "the tests of files and messages",
    "pytest_benchmark": "all benchmarks (package pytest-benchmark)",
    "cupy": "the GPU kernels (package cupy-cuda12x or cupy-cuda13x)",
}
#: Without these nothing can run at all.
ESSENTIAL = ("torch", "numpy", "pytest", "msgspec", "xxhash")
NOTHING_COLLECTED = 5


@dataclass(frozen=True, slots=True)
class Step:
    """One finished step of the suite."""

    name: str
    command: list[str]
    exit_code: int | None
    seconds: float

    @property
    def failed(self) -> bool:
        return self.exit_code not in (0, NOTHING_COLLECTED)


class Suite:
    """Runs steps one after the other and keeps what they print in the output directory."""

    def __init__(self, out: Path, device: str, limit_s: float) -> None:
        self.out = out
        self._limit_s = limit_s
        self._environ = dict(os.environ) | {
            "GPUSLICE_BENCH_DEVICE": device,
            "PYTHONPATH": os.pathsep.join([str(link_tree()), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        self.steps: list[Step] = []

    def run(self, name: str, *words: str, output: str) -> Step:
        """Run a Python command with a deadline; its output goes to the file ``output``."""
        command = [sys.executable, *words]
        print(f"{name}: {' '.join(words)}", flush=True)
        started = time.monotonic()
        with (self.out / output).open("wb") as log:
            try:
                code: int | None = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=self._environ,
                    stdout=log,
                    stderr=None,
                    timeout=self._limit_s,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        step = Step(name, command, code, round(time.monotonic() - started, 1))
        outcome = {None: "ran out of time", NOTHING_COLLECTED: "nothing to run"}.get(
            code, f"exit code {code}"
        )
        print(f"{name}: {outcome} after {step.seconds} s, see {self.out / output}", flush=True)
        self.steps.append(step)
        return step


def link_tree() -> Path:
    """A directory for PYTHONPATH that shows the checkout as the package, without installing anything."""
    subprocess.run(["sh", str(ROOT / "x"), "types"], check=True)
    return ROOT / ".typetree"


def missing() -> dict[str, str]:
    """Packages that cannot be imported here, with what is lost."""
    return {name: loss for name, loss in NEEDED.items() if importlib.util.find_spec(name) is None}


def pytest_words(*words: str) -> list[str]:
    """A pytest command that does not depend on plugins that may be missing."""
    options = ["-o", "addopts=--import-mode=importlib --strict-markers", "--continue-on-collection-errors"]
    return ["-m", "pytest", "-c", "pyproject.toml", *options, "-ra", *words]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    parser.add_argument("--device", default="cuda:0", help="what to measure on")
    parser.add_argument("--limit", type=float, default=540, metavar="SECONDS", help="for each of the steps")
    arguments = parser.parse_args()
    lost = missing()
    for name, loss in lost.items():
        print(f"missing: {name}; without it goes {loss}", flush=True)
    if any(name in lost for name in ESSENTIAL):
        print("stopped: see README.md for how to bring these packages along", file=sys.stderr)
        return 3
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    suite = Suite(out, arguments.device, arguments.limit)
    if {"typer", "rich", "pynvml"}.isdisjoint(lost):
        suite.run("doctor", "-m", "gpuslice", "doctor", "--json", "--check", output="doctor.json")
    suite.run(
        "tests", *pytest_words("-m", "gpu", f"--junitxml={out / 'tests.xml'}", "tests"), output="tests.log"
    )
    if "pytest_benchmark" not in lost:
        words = pytest_words("--benchmark-only", f"--benchmark-json={out / 'benchmarks.json'}", "benchmarks")
        suite.run("benchmarks", *words, output="benchmarks.log")
    sizes = "1,4,16,40" if arguments.device.startswith("cuda") else "0.1"
    words = ["benchmarks/gpu_suite/copy_phase.py", "--device", arguments.device, "--sizes", sizes]
    suite.run("copy_phase", *words, "--out", str(out / "copy_phase.json"), output="copy_phase.log")
    summary = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "device": arguments.device,
        "missing": lost,
        "steps": [asdict(step) for step in suite.steps],
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return int(any(step.failed for step in suite.steps))


if __name__ == "__main__":
    sys.exit(main())
