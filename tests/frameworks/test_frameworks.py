"""Trainings by widely used frameworks: suspended at every third boundary, each ends as an undisturbed one.

``./x test-frameworks`` installs the frameworks and runs these tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..patience import PATIENCE_S

SCRIPTS = Path(__file__).with_name("scripts")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
#: Scripts, their words, and the packages that they need.
ALONE = [
    ("transformers_trainer.py", "0", "transformers"),
    ("transformers_trainer.py", "2", "transformers"),
    ("peft_lora.py", "", "peft"),
    ("accelerate_loop.py", "", "accelerate"),
    ("lightning_trainer.py", "1", "lightning"),
    ("lightning_trainer.py", "2", "lightning"),
    ("diffusers_unet.py", "", "diffusers"),
    ("stable_baselines.py", "ppo", "stable_baselines3"),
    ("stable_baselines.py", "dqn", "stable_baselines3"),
    ("stable_baselines.py", "sac", "stable_baselines3"),
    ("ignite_engine.py", "", "ignite"),
    ("skorch_classifier.py", "", "skorch"),
    ("geometric_graphs.py", "", "torch_geometric"),
]
BY_TORCHRUN = [("transformers_trainer.py", "0", "transformers"), ("accelerate_loop.py", "", "accelerate")]
#: Switches of a training, at least.
SWITCHES = 6

pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


def trained(*words: str, directory: Path) -> list[str]:
    """The digests that a training prints, one of each rank that prints any."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    environ["GPUSLICE_RAMDISK_DIR"] = str(directory / "ramdisk")
    done = subprocess.run(
        [sys.executable, *words],
        env=environ,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return sorted(line for line in done.stdout.splitlines() if line.startswith("digest"))


def check(command: list[str], run: list[str], directory: Path) -> None:
    """Compare what ``command`` prints with what it prints when ``run`` suspends it."""
    undisturbed = trained(*command, directory=directory)
    assert undisturbed
    options = ["-m", "gpuslice", "run", "--suspend-every", "3", "--report", str(directory / "report.json")]
    assert trained(*options, *run, directory=directory) == undisturbed
    reports = [json.loads(path.read_text()) for path in directory.glob("report*.json")]
    assert reports
    assert all(len(one["switches"]) >= SWITCHES for one in reports)


def words(script: str, options: str, package: str) -> list[str]:
    """The command line of a script whose package is here."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: ./x test-frameworks")
    return [str(SCRIPTS / script), *options.split()]


@pytest.mark.parametrize(("script", "options", "package"), ALONE)
def test_a_suspended_training_ends_as_an_undisturbed_one(
    script: str, options: str, package: str, tmp_path: Path
) -> None:
    command = words(script, options, package)
    check(command, command, tmp_path)


@pytest.mark.parametrize(("script", "options", "package"), BY_TORCHRUN)
def test_so_do_two_ranks_of_torchrun(script: str, options: str, package: str, tmp_path: Path) -> None:
    command = [*TORCHRUN, *words(script, options, package)]
    check(command, ["--", sys.executable, *command], tmp_path)
