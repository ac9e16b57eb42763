"""``gpuslice up --ray`` where there is no Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Shell


def test_without_ray_it_says_what_to_install(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('No module named ray')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = shell("up", "--ray", "auto", code=3)
    assert "Ray cannot be imported" in said
    assert "pip install 'gpuslice[ray]'" in said
    assert not (shell.directory / "scheduler.pid").exists()


def test_without_the_option_nobody_looks_for_ray(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    shell.up()
    shell("down")
    assert not (tmp_path / "imported").exists()
