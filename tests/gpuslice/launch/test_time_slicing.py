"""Scripts in turns: one trains at a time, whole cycles count, and what cannot take turns is told apart."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuslice import config
from gpuslice.errors import UsageError
from gpuslice.launch.time_slicing import run_sliced
from gpuslice.profiler.recorder import Recording

#: A job without torch: it steps, gives way and writes its recording as one under gpuslice does.
JOB = """
import os, sys, time
from pathlib import Path
import msgspec
from gpuslice.launch.step_control import StepControl
from gpuslice.profiler.recorder import StepRecorder

ends_after = int(sys.argv[1])
path = Path(os.environ["GPUSLICE_PROFILE"])
control, turns = StepControl.beside(path), StepControl.of_turns(path)
recorder = StepRecorder()
steps = 0
while True:
    recorder.boundary(steps)
    if control.passed(recorder.intervals) or steps == ends_after:
        break
    if turns.away:
        turns.await_turn()
    time.sleep(0.001)
    steps += 1
path.write_bytes(msgspec.json.encode(recorder.finish()))
"""


def sliced(place: Path, monkeypatch: pytest.MonkeyPatch, *ends_after: int) -> Any:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place))
    (place / "job.py").write_text(JOB, encoding="utf-8")
    (place / "trial").mkdir()
    commands = [[str(place / "job.py"), str(count)] for count in ends_after]
    names = [f"job {number}" for number in range(len(commands))]
    return run_sliced(names, commands, config.load(device="cpu:0"), 0.4, 0.1, place / "trial")


def test_each_trains_in_its_own_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = sliced(tmp_path, monkeypatch, -1, -1)
    assert [one.starts for one in runs] == [1, 1]
    assert runs[0].seconds == runs[1].seconds >= 0.4
    assert all(one.steps > 0 and one.step_seconds for one in runs)
    found = [
        msgspec.json.decode((tmp_path / "trial" / f"{number}" / "1.json").read_bytes(), type=Recording)
        for number in range(2)
    ]
    away = [max(one.interval_s) for one in found]
    assert min(away) >= 0.1, "each was away for the other's turn"


def test_one_that_ends_in_every_cycle_cannot_be_sliced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sliced(tmp_path, monkeypatch, -1, 12) is None


def test_the_others_end_with_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trial").mkdir()
    (tmp_path / "broken.py").write_text("raise SystemExit(7)", encoding="utf-8")
    started: list[subprocess.Popen[bytes]] = []

    def begin(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(*words, **options))
        return started[-1]

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    commands = [[str(tmp_path / "job.py"), "-1"], [str(tmp_path / "broken.py")]]
    with pytest.raises(UsageError, match="b failed with exit status 7"):
        run_sliced(["a", "b"], commands, config.load(device="cpu:0"), 0.4, 0.1, tmp_path / "trial", begin)
    assert [one.poll() is None for one in started] == [False, False]
