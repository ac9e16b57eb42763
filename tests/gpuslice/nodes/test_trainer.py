"""A training with Ray's TorchTrainer, submitted as it is: suspended, moved, killed, and started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ...cli.conftest import Shell, shell_in
from ...cli.waiting import until
from ...patience import PATIENCE_S

pytestmark = pytest.mark.ray
SCRIPT = Path(__file__).with_name("trainer.py")
EPOCHS = "3"
#: Steps of a worker: 32 batches of 8 samples, half of them its own.
STEPS = 16 * int(EPOCHS)


def found(directory: Path) -> list[dict[str, object]]:
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    pytest.importorskip("ray.train", reason="Ray Train is not installed: ./x test-nodes")
    made = tmp_path / "found"
    made.mkdir()
    return made


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setenv("GPUSLICE_RAMDISK_DIR", str(tmp_path / "ramdisk"))
    with shell_in(tmp_path / "s") as made:
        made("up", "--devices", "cpu:2", "--quantum", "1s")
        yield made


def submit(shell: Shell, directory: Path, *words: str, code: int = 0) -> str:
    options = ("--devices", "2", "--name", "trainer", "--max-restarts", "1", "--checkpoint-every", "4")
    return shell("submit", *options, str(SCRIPT), str(directory), EPOCHS, *words, code=code)


def test_a_trainer_goes_on_bit_for_bit_through_turns_and_a_killed_worker(
    shell: Shell, tmp_path: Path, directory: Path
) -> None:
    by_ray = tmp_path / "by-ray"
    by_ray.mkdir()
    # Ray itself, with workers that are its actors, and without gpuslice.
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), str(by_ray), EPOCHS, "2"],
        env={**os.environ, "RAY_ADDRESS": "local"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as alone:
        goes_on(shell, tmp_path / "enough", directory)
        _, said = alone.communicate()
    assert alone.returncode == 0, said
    for ours, rays in zip(found(directory), found(by_ray), strict=True):
        assert (rays["made"], ours["ranks"]) == (STEPS, 2)
        assert ours["made"] < STEPS, "it has begun anew"  # type: ignore[operator]
        assert ours["digest"] == rays["digest"]


def goes_on(shell: Shell, enough: Path, directory: Path) -> None:
    """It is suspended, and its second worker killed later."""
    client = shell.client()
    assert submit(shell, directory, "2", "1", "30", str(enough)) == "trainer\n"
    until(client, "trainer", lambda job: job.steps > 20)
    shell("suspend", "trainer")
    until(client, "trainer", lambda job: job.state == "suspended")
    shell("resume", "trainer")
    enough.touch()
    ended = client.wait("trainer", PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.restarts) == ("succeeded", 1), (ended, shell("logs", "trainer", "--err"))
    assert (directory / "survived").exists()


def test_a_trainer_with_another_number_of_workers_than_devices_is_told_what_to_do(
    shell: Shell, directory: Path
) -> None:
    client = shell.client()
    submit(shell, directory, "3")
    ended = client.wait("trainer", PATIENCE_S)
    assert ended is not None
    assert ended.state == "failed"
    said = shell("logs", "trainer", "--err")
    assert "TorchTrainer has 3 workers, but its job has 2" in said
    assert "submit it with --devices 3" in said
