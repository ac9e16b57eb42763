"""``trainings --out FILE``: trainings of well-known libraries, plain and under ``gpuslice run``.

A suspend every fourth batch; both must print the same digest. Exit code 1 if one does not. What a switch of
such a process takes is part of the result: other trainings ran at the same time, so the times are no limits.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu_suite.environment import is_simulated
from benchmarks.gpu_suite.measuring import SHM, Row, write
from benchmarks.gpu_suite.repros import execute
from benchmarks.states import median

SCRIPT = Path(__file__).with_name("models.py")
FIGURES = ("find_s", "admit_s", "copy_out_s", "publish_s", "free_s", "reserve_s", "copy_in_s")


@dataclass(frozen=True, slots=True)
class Training:
    """A model of `models`, the package it needs, options of ``gpuslice run``, and its environment."""

    model: str
    needs: str
    options: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join([self.model, *self.options, *self.environ.values()])


TRAININGS = (
    Training("resnet", "torchvision", ("--route", "tensor")),
    Training("resnet", "torchvision", ("--route", "vmm")),
    Training("gpt", "transformers", ("--route", "tensor")),
    Training(
        "gpt", "transformers", ("--route", "tensor"), {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    ),
    Training("gpt-compiled", "transformers", ("--route", "tensor")),
    Training("gpt-reduce-overhead", "transformers", ("--route", "vmm")),
    Training("lstm", "torch", ("--route", "tensor")),
    Training("lightning", "lightning", ("--route", "tensor")),
)


def examine(training: Training, directory: Path) -> Row:
    """What the switches took, or ``wrong`` with what went wrong, or ``skipped``."""
    if importlib.util.find_spec(training.needs) is None:
        return {"skipped": f"{training.needs} is not installed"}
    report = directory / "report.json"
    environ = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "2", **training.environ}
    words = ["--suspend-every", "4", "--ramdisk-dir", str(directory / "ramdisk"), "--report", str(report)]
    run = [sys.executable, "-m", "gpuslice", "run", "--device", "cuda:0", *words, *training.options]
    script = [str(SCRIPT), training.model]
    try:
        code, expected, said = execute([sys.executable, *script], environ, directory)
        if code != 0:
            return {"wrong": f"plain, it ended with {code}: {said}"}
        code, found, said = execute([*run, *script], environ, directory)
    except subprocess.TimeoutExpired as error:
        return {"wrong": str(error)}
    if code != 0:
        return {"wrong": f"under gpuslice it ended with {code}: {said}"}
    switches = json.loads(report.read_text(encoding="utf-8"))["switches"]
    if found != expected or len(switches) < 3:
        return {"wrong": f"printed {found!r} after {len(switches)} switches, plain {expected!r}"}
    warm = switches[2:]
    figures = {name: median([switch[name] for switch in warm]) for name in FIGURES}
    return {"switches": len(switches), "bytes": warm[-1]["bytes_freed"], **figures}


def examine_one(training: Training) -> tuple[str, Row]:
    with tempfile.TemporaryDirectory(prefix="gpuslice-training-", dir=SHM) as directory:
        os.chmod(directory, 0o700)
        return training.name, examine(training, Path(directory))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=5, help="trainings that run at the same time")
    arguments = parser.parse_args()
    device = torch.device("cuda:0")
    if is_simulated(device):
        write(arguments.out, {"skipped": "cuBLAS and cuDNN are not simulated", "finished": True}, device)
        return 0
    found: dict[str, Row] = {}
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for name, row in pool.map(examine_one, TRAININGS):
            found[name] = row
            print(f"{name}: {row}", flush=True)
            write(arguments.out, {"trainings": found}, device)
    write(arguments.out, {"trainings": found, "finished": True}, device)
    return int(any("wrong" in row for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
