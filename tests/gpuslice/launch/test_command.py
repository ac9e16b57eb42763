"""What ``gpuslice run`` would execute, and what it refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpuslice import config
from gpuslice.config import Settings
from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.launch import command


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    return "train.py"


def test_a_script_gets_all_words_after_it(script: str) -> None:
    words = [script, "--device", "x", "--", "-m", "y"]
    assert command.command_line(words) == [sys.executable, *words]


def test_a_module() -> None:
    assert command.command_line(["-m", "package.module", "--lr", "3"]) == [
        *(sys.executable, "-m"),
        *("package.module", "--lr", "3"),
    ]


def test_a_command_is_run_as_it_is() -> None:
    assert command.command_line(["--", "sh", "-c", "true"]) == ["sh", "-c", "true"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "nothing to run"),
        (["-m"], "-m without a module"),
        (["--"], "-- without a command"),
        (["nowhere.py"], "'nowhere.py'"),
        (["--", "no-such-command-anywhere"], "'no-such-command-anywhere'"),
        (["--suspend-evry", "3", "train.py"], "--suspend-evry"),
    ],
)
def test_what_cannot_be_run_is_named(words: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        command.command_line(words)


def test_a_directory_is_run_as_python_runs_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a directory without a __main__"):
        command.command_line([str(tmp_path)])
    (tmp_path / "__main__.py").touch()
    assert command.command_line([str(tmp_path)]) == [sys.executable, str(tmp_path)]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (Settings(suspend_every=2, suspend_at="3"), "--suspend-every and --suspend-at"),
        (Settings(device="gpu"), "'gpu'"),
        (Settings(job="a/b"), "'a/b'"),
        (Settings(report="/nowhere/at/all/r.json"), "/nowhere/at/all/r.json"),
        (Settings(report="/"), "/ is a directory"),
        (Settings(report="/dev/null"), "/dev/null is not a regular file"),
        (Settings(report="/proc/r.json"), "/proc/r.json cannot be written"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: Settings, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        command.check(settings)


def test_a_report_over_the_script_or_its_data_is_refused(tmp_path: Path) -> None:
    script, data = tmp_path / "train.py", tmp_path / "data.json"
    for path in (script, data):
        path.write_text("1")
        with pytest.raises(UsageError, match=f"--report {path} would overwrite what is read"):
            command.execute([str(script), str(data)], Settings(report=str(path)))
        assert path.read_text() == "1"


def test_a_gpu_without_a_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_has_nvidia_driver", lambda: False)
    with pytest.raises(EnvironmentUnusableError, match="cuda:1 needs an NVIDIA driver") as refused:
        command.check(Settings(device="cuda:1"))
    assert refused.value.remedy == "use the device cpu or see `gpuslice doctor`"  # `up` has --devices


def test_paths_do_not_depend_on_where_the_script_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checked = command.check(Settings(report="r.json", ramdisk_dir="rd"))
    assert (checked.report, checked.ramdisk_dir) == (f"{tmp_path}/r.json", f"{tmp_path}/rd")


def test_the_environment_carries_settings_and_hooks_and_nothing_of_an_outer_run() -> None:
    outer = {"HOME": "/home/a", "PYTHONPATH": "/own", "GPUSLICE_SUSPEND_EVERY": "9", command.ARMED: "0"}
    settings = Settings(device="cpu:1")
    inner = command.environment(settings, outer)
    assert config.load(inner) == settings
    assert inner["HOME"] == "/home/a"
    assert inner["PYTHONPATH"] == f"{command.SITEDIR}{os.pathsep}/own"
    assert inner[command.LAUNCH] == str(os.getpid())
    assert command.ARMED not in inner
    assert command.environment(settings, {})["PYTHONPATH"] == str(command.SITEDIR)


def test_what_is_written_at_the_end_is_checked_before(tmp_path: Path) -> None:
    command.check_outputs({"--json": tmp_path / "a.json", "--html": None})
    command.check_outputs({"--json": Path("/dev/null")}, devices=True)
    for devices in (False, True):
        with pytest.raises(UsageError, match=f"--html {tmp_path} is a directory"):
            command.check_outputs({"--json": tmp_path / "a.json", "--html": tmp_path}, devices=devices)
    with pytest.raises(UsageError, match="--json /dev/null is not a regular file"):
        command.check_outputs({"--json": Path("/dev/null")})
    assert list(tmp_path.iterdir()) == []


def test_what_would_overwrite_another_file_of_the_same_command_is_refused(tmp_path: Path) -> None:
    trace, same = tmp_path / "trace.csv", tmp_path / "same.csv"
    trace.write_text("id\n")
    same.symlink_to(trace)
    command.check_outputs({"--json": tmp_path / "a"}, inputs=(trace, None))
    for path in (trace, same):
        with pytest.raises(UsageError, match=f"--per-job {path} would overwrite what is read"):
            command.check_outputs({"--per-job": path}, inputs=(None, trace))
    with pytest.raises(UsageError, match=f"--html {tmp_path / 'a'} would overwrite --json"):
        command.check_outputs({"--json": tmp_path / "a", "--html": tmp_path / "a"})
    command.check_outputs({"--json": Path("/dev/null"), "--html": Path("/dev/null")}, devices=True)
