"""A training with Ray's TorchTrainer, submitted as it is: suspended, moved, killed, and started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuslice.client.client import Client

from ...cli.conftest import Shell, shell_in
from ...cli.waiting import until
from ...patience import PATIENCE_S
from .conftest import RayNodes
from .sharing import shared_by

pytestmark = pytest.mark.ray
SCRIPT = Path(__file__).with_name("trainer.py")
EPOCHS = "6"
#: Steps of a worker: 32 batches of 8 samples, half of them its own.
STEPS = 16 * int(EPOCHS)


def found(directory: Path) -> list[dict[str, object]]:
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    pytest.importorskip("ray.train", reason="Ray Train is not installed: ./x test-gangs")
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
    with trained_by_ray(tmp_path) as by_ray:
        goes_on(shell, tmp_path / "enough", directory)
    for ours, rays in zip(found(directory), found(by_ray), strict=True):
        assert (rays["made"], ours["ranks"]) == (STEPS, 2)
        assert ours["made"] < STEPS, "it has begun anew"  # type: ignore[operator]
        assert ours["digest"] == rays["digest"]


@contextmanager
def trained_by_ray(directory: Path) -> Iterator[Path]:
    """What Ray itself finds meanwhile, with workers that are its actors and without gpuslice."""
    by_ray = directory / "by-ray"
    by_ray.mkdir()
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), str(by_ray), EPOCHS, "2"],
        env={**os.environ, "RAY_ADDRESS": "local"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as alone:
        yield by_ray
        _, said = alone.communicate()
    assert alone.returncode == 0, said


def test_a_trainer_has_its_workers_on_two_nodes_and_moves_to_one(
    tmp_path: Path, directory: Path, rays: RayNodes
) -> None:
    with shared_by(tmp_path, rays.address, rays.ramdisk) as nodes, trained_by_ray(tmp_path) as by_ray:
        nodes.up("--devices", "cpu:2")
        client = nodes.shell.client()
        (there,) = nodes.others
        submit(nodes.shell, directory, "2", "-1", "-1", str(nodes.enough))
        client.migrate("trainer", ["cpu:0", f"{there}/cpu:0"])
        steps = apart(client, ("cpu:0", f"{there}/cpu:0"), 20)
        client.suspend("trainer")
        until(client, "trainer", lambda job: job.state == "suspended")
        client.resume("trainer")
        steps = apart(client, ("cpu:0", f"{there}/cpu:0"), steps)
        client.migrate("trainer", [f"{there}/cpu:0", f"{there}/cpu:1"])
        apart(client, (f"{there}/cpu:0", f"{there}/cpu:1"), steps)
        nodes.enough.touch()
        ended = client.wait("trainer", PATIENCE_S)
        assert ended is not None
        assert (ended.state, ended.restarts) == ("succeeded", 0), nodes.shell("logs", "trainer", "--err")
        nodes.shell("down")
    assert [one["digest"] for one in found(directory)] == [one["digest"] for one in found(by_ray)]
    assert all(one["made"] < STEPS for one in found(directory))  # type: ignore[operator]


def apart(client: Client, devices: tuple[str, ...], steps: int) -> int:
    """Until it trains on ``devices``, beyond ``steps``; how far it is then."""
    return until(client, "trainer", lambda job: job.devices == devices and job.steps > steps).steps


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
