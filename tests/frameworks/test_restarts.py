"""Trainers that are killed, or kept over a reboot, end as undisturbed ones.

They restart by their own checkpoints; the scripts do not know of gpuslice, and stop early. A loop with
Accelerate uses ``attach``. ``./x test-frameworks`` installs the newest versions, and older ones beside them.
docs/training-scripts.md has the results.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuslice.frameworks.lightning_trainer import refusal_of_loading

from ..cli.conftest import Shell, shell_in
from ..cli.waiting import until
from ..patience import PATIENCE_S

SCRIPTS = Path(__file__).with_name("restarts")
OLDER = Path(sys.prefix) / "older"
#: Scripts with their words, how many steps the trainings make, and which versions they are tried with.
TRAININGS = [
    ("transformers_trainer.py 2 1 shuffle", 45, "newest"),
    ("transformers_trainer.py 0 3 group", 15, "newest"),
    ("transformers_trainer.py 2 2 group", 24, "older"),
    ("lightning_trainer.py lightning.pytorch 0 1", 50, "newest"),
    ("lightning_trainer.py pytorch_lightning 2 2", 25, "older"),
    ("accelerate_loop.py 0", 60, "newest"),
    ("accelerate_loop.py 2", 60, "older"),
]
KEPT = ["transformers_trainer.py 0 1 shuffle", "lightning_trainer.py lightning.pytorch 0 1"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.frameworks,
    pytest.mark.skipif(not OLDER.is_dir(), reason="needs ./x test-frameworks"),
]


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    for name, value in {**variables, "GPUSLICE_RAMDISK_DIR": str(tmp_path / "ramdisk")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with shell_in(tmp_path / "s") as found:
        yield found


def command(training: str) -> list[str]:
    script, *words = training.split()
    return [str(SCRIPTS / script), *words]


def trained(*words: str, kill_at: int = sys.maxsize) -> str:
    """Return the digest that a training prints; "" if it is killed, at step ``kill_at`` or later."""
    with Path("stderr").open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("digest"):
                return line
            if line.startswith("step ") and int(line.split()[1]) >= kill_at:
                os.killpg(process.pid, 9)
                return ""
    raise AssertionError(Path("stderr").read_text()[-4000:])


@pytest.mark.parametrize(("training", "steps", "versions"), TRAININGS)
def test_a_killed_trainer_goes_on(
    training: str, steps: int, versions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if versions == "older":
        monkeypatch.setenv("PYTHONPATH", str(OLDER))
    undisturbed = trained(*command(training))
    run = ["-m", "gpuslice", "run", "--job", "k", "--checkpoint-every", "3", *command(training)]
    for kill_at in sorted(random.sample(range(5, steps - 2), 2)):
        print("killed at step", kill_at)
        assert trained(*run, kill_at=kill_at) == ""
    assert trained(*run) == undisturbed
    told = Path("stderr").read_text()
    assert told.count("goes on from boundary") == 2, told
    print(told)


@pytest.mark.parametrize("training", KEPT)
def test_one_goes_on_though_the_ram_disk_was_emptied(training: str, tmp_path: Path, shell: Shell) -> None:
    undisturbed = trained(*command(training))
    Path("slowly").touch()
    shell("up", "--devices", "cpu:1")
    client = shell.client()
    job = client.submit(command(training))
    until(client, job, lambda info: info.steps > 4)
    shell("down", "--keep")
    shutil.rmtree(tmp_path / "ramdisk")
    Path("slowly").unlink()
    shell("up", "--devices", "cpu:1")
    client = shell.client()
    ended = client.wait(job, PATIENCE_S)
    told = Path(client.logs(job).err).read_text()
    assert ended is not None
    assert ended.state == "succeeded", told
    assert "goes on from boundary" in told
    assert undisturbed in Path(client.logs(job).out).read_text().splitlines(keepends=True)
    shell("down")


@pytest.mark.parametrize(
    ("values", "words", "refused"),
    [({"lr": 0.1}, {}, False), ({"lr": Path}, {}, True), ({"lr": Path}, {"weights_only": False}, False)],
)
def test_hyper_parameters_that_lightning_would_not_load_forbid_a_restart(
    values: dict[str, object], words: dict[str, object], refused: bool
) -> None:
    refusal = refusal_of_loading({"model": SimpleNamespace(hparams=values), **words})
    assert bool(refusal) is refused
