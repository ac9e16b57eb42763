"""Trainers that are killed and started again under their job's name end as undisturbed ones.

The frameworks restart by their own checkpoints; the scripts do not know of gpuslice. ``./x test-frameworks``
installs the newest versions. docs/training-scripts.md has the results, also of older versions.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).with_name("restarts")
#: Scripts, their words, their package, and how many steps the training has at least.
TRAININGS = [
    ("transformers_trainer.py", "0 1 shuffle", "transformers", 45),
    ("transformers_trainer.py", "2 1 shuffle", "transformers", 45),
    ("transformers_trainer.py", "0 3 group", "transformers", 15),
    ("transformers_trainer.py", "2 2 group", "transformers", 21),
    ("lightning_trainer.py", "lightning.pytorch 0 1", "lightning", 60),
    ("lightning_trainer.py", "lightning.pytorch 2 2", "lightning", 30),
]

pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


def trained(*words: str, directory: Path, kill_at: int = 0) -> str:
    """Return the digest that a training prints; "" if it is killed when it prints ``step kill_at``."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    environ["GPUSLICE_RAMDISK_DIR"] = str(directory / "ramdisk")
    errors = (directory / "stderr").open("a+")
    with subprocess.Popen(
        [sys.executable, *words],
        env=environ,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("digest"):
                return line
            if kill_at and line.startswith(f"step {kill_at} "):
                os.killpg(process.pid, 9)
                return ""
    raise AssertionError((directory / "stderr").read_text()[-4000:])


@pytest.mark.parametrize(("script", "options", "package", "steps"), TRAININGS)
def test_a_killed_trainer_goes_on(
    script: str, options: str, package: str, steps: int, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: ./x test-frameworks")
    command = [str(SCRIPTS / script), *options.split()]
    undisturbed = trained(*command, directory=tmp_path)
    run = ["-m", "gpuslice", "run", "--job", "k", "--checkpoint-every", "3", *command]
    for kill_at in sorted(random.sample(range(4, steps), 2)):
        print("killed at step", kill_at)
        assert trained(*run, directory=tmp_path, kill_at=kill_at) == ""
    assert trained(*run, directory=tmp_path) == undisturbed
    assert "goes on from boundary" in (tmp_path / "stderr").read_text()
