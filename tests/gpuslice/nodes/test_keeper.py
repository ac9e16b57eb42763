"""The actor that keeps an agent alive, without Ray."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpuslice.node_agents import keeper
from gpuslice.node_agents.agent_process import CONFIG


def test_an_agent_that_does_not_start_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / CONFIG).touch()
    failures = [OSError(12, "Cannot allocate memory"), subprocess.CalledProcessError(1, "agent")]
    running: list[int] = []

    def start(*words: object, **options: object) -> None:
        if failures:
            raise failures.pop(0)
        running.append(17)
        (tmp_path / CONFIG).unlink()  # as one that is told to leave does

    monkeypatch.setattr(keeper.subprocess, "run", start)
    monkeypatch.setattr(keeper, "running", lambda directory: running[0] if running else 0)
    monkeypatch.setattr(keeper, "_TRY_AGAIN_S", 0.0)
    monkeypatch.setattr(keeper, "_LOOK_AGAIN_S", 0.0)
    kept = keeper.AgentKeeper("", b"")
    kept._directory = tmp_path
    kept._watch()
    assert running == [17]
    assert capsys.readouterr().err.count("did not start") == 2
