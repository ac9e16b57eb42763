"""Real loads: beside each other, and one that cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice import config
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.launch.stress_sweep import reference
from gpuslice.profiler.colocation.stress import LEVELS


@pytest.mark.slow
def test_loads_on_one_core_slow_each_other_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = reference(config.load(device="cpu:0"), ("compute",), 0.2, 0, tmp_path)
    assert sorted(one.level for one in found) == list(LEVELS)
    assert all(one.units_per_second > 0 and one.normalized is not None for one in found)


def test_a_load_that_fails_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "numba.py").write_text("raise ImportError('no numba here')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EnvironmentUnusableError, match="no numba here"):
        reference(config.load(device="cpu:0"), ("compute",), 0.2, 0, tmp_path)
