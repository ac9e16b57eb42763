"""Scripts side by side: their output when they fail, and no process of theirs that stays."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice import config
from gpuslice.errors import UsageError
from gpuslice.launch.colocation import run_together
from gpuslice.launch.measured_script import device_cores
from gpuslice.types import DeviceName


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trial").mkdir()
    return tmp_path


@pytest.fixture
def alive(place: Path) -> Iterator[int]:
    """The reading end of a pipe ``alive``, which is open as long as a process that has opened it lives."""
    os.mkfifo(place / "alive")
    pipe = os.open(place / "alive", os.O_RDONLY | os.O_NONBLOCK)
    yield pipe
    os.close(pipe)


def run(place: Path, *scripts: str) -> None:
    settings = config.load(device="cpu:0")
    commands = []
    for number, script in enumerate(scripts):
        (place / f"{number}.py").write_text(script, encoding="utf-8")
        commands.append([str(place / f"{number}.py")])
    run_together(
        [f"job {number}" for number in range(len(scripts))], commands, settings, 0.1, place / "trial"
    )


def test_only_the_last_lines_of_a_failed_script_are_shown(place: Path) -> None:
    with pytest.raises(UsageError) as raised:
        run(place, "for n in range(100): print('line', n)\nraise SystemExit(7)")
    assert "job 0 failed with exit status 7" in raised.value.message
    lines = raised.value.message.splitlines()[1:]
    assert lines == [f"  line {number}" for number in range(90, 100)]


def test_a_script_that_is_killed(place: Path) -> None:
    with pytest.raises(UsageError, match="job 0 was killed by signal 9"):
        run(place, "import os; os.kill(os.getpid(), 9)")


def test_the_others_end_with_one_that_fails(place: Path, alive: int) -> None:
    stays = "import signal\nalive, ready = open('alive', 'w'), open('ready', 'w')\nsignal.pause()"
    os.mkfifo(place / "ready")
    with pytest.raises(UsageError, match="job 1 failed"):
        run(place, stays, "open('ready').close()\nraise SystemExit(1)")
    assert nobody_has(alive)


def test_what_a_script_leaves_behind_ends(place: Path, alive: int) -> None:
    leaves = "import subprocess\nsubprocess.Popen(['sleep', '1000'], stdout=open('alive', 'w'))"
    with pytest.raises(UsageError, match="recorded no step"):
        run(place, leaves)
    assert nobody_has(alive)


def nobody_has(pipe: int) -> bool:
    """Wait until nobody who had it open can write into ``pipe`` any more."""
    select.select([pipe], [], [])
    return os.read(pipe, 1) == b""


def test_slots_have_cores_and_other_devices_do_not() -> None:
    cores = device_cores(DeviceName("cpu", 0), len(os.sched_getaffinity(0)))
    assert cores == {min(os.sched_getaffinity(0))}
    assert device_cores(DeviceName("cpu", None), 0) is None
    assert device_cores(DeviceName("cuda", 0), 0) is None
