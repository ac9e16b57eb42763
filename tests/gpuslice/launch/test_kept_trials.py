"""What an experiment has measured outlives it, once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.launch.kept_trials import KeptTrials, kept_path
from gpuslice.profiler.colocation.trial import Run, Trial

TRIAL = Trial(0, (0, 1), "packed", 2.5, (Run(10.0, 2.0, 1, None, (0.1, 0.2)),) * 2)


def test_trials_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with KeptTrials(path) as kept:
        kept.add(TRIAL)
    with KeptTrials(path) as kept:
        assert kept.trials == [TRIAL]
        kept.forget()
    with KeptTrials(path) as kept:
        assert kept.trials == []


def test_half_a_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with KeptTrials(path) as kept:
        kept.add(TRIAL)
    with path.open("ab") as file:
        file.write(b'{"round": 0, "mem')
    for expected in (1, 2):
        with KeptTrials(path) as kept:
            assert kept.trials == [TRIAL] * expected
            kept.add(TRIAL)


def test_damage_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"nonsense\n")
    with pytest.raises(EnvironmentUnusableError, match="damaged"):
        KeptTrials(path)
    assert path.read_bytes() == b"nonsense\n"


def test_only_one_at_a_time(tmp_path: Path) -> None:
    with KeptTrials(tmp_path / "kept"), pytest.raises(UsageError, match="is running already"):
        KeptTrials(tmp_path / "kept")


def test_another_script_is_another_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "a.py"
    script.write_text("1", encoding="utf-8")

    def path(
        commands: Sequence[Sequence[str]] = (("a.py", "--lr", "1"),),
        device: str = "cpu:0",
        numbers: Sequence[object] = (0, 2, 20.0),
    ) -> Path:
        return kept_path(tmp_path / "state", commands, device, numbers)

    first = path()
    assert path() == first
    assert path(device="cpu:1") != first
    assert path(numbers=(0, 2, 10.0)) != first
    assert path((("a.py", "--lr", "2"),)) != first
    script.write_text("2", encoding="utf-8")
    assert path() != first
