"""What the benchmark of long queues counts."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_process_that_ended_while_the_others_were_looked_for_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])  # last: gpuslice is the one under test
    run = importlib.import_module("benchmarks.long_queue.run")
    ended = subprocess.Popen(["true"])
    found = [psutil.Process(ended.pid), psutil.Process()]
    ended.wait()
    assert run.at_one_time(found) == [psutil.Process()]
