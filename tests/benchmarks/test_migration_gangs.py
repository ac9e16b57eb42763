"""What the benchmark of migrating gangs does where the memory is not enough."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_state_that_does_not_fit_is_refused_before_a_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])  # last: gpuslice is the one under test
    gangs = importlib.import_module("benchmarks.migration_latency.gangs")
    monkeypatch.setattr(gangs, "Gang", None)
    monkeypatch.setattr(gangs, "available_bytes", lambda: 1000 << 20)
    words = ["gangs", str(tmp_path / "out.json"), "--mib", "200", "--ranks", "1"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="200 MiB on 1 ranks take 1250 MiB of memory; 1000 MiB are free"):
        gangs.main()
