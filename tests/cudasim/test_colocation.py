"""Scripts that share the simulated GPU: their steps by CUDA events, their memory by torch's allocator."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice import config
from gpuslice.launch.colocation import run_together

from .test_profiling import TRAIN

MIB = 1 << 20


def test_two_scripts_on_a_gpu(
    tmp_path: Path, script_environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("80, 4", "10_000_000, 4"), encoding="utf-8")
    for name, value in script_environ.items():
        monkeypatch.setenv(name, value)
    settings = config.load(environ={"XDG_CONFIG_HOME": str(tmp_path)}, device="cuda:0")
    (tmp_path / "trial").mkdir()
    runs = run_together(["a", "b"], [[str(script)]] * 2, settings, 0.05, tmp_path / "trial")
    for one in runs:
        assert one.steps > 0
        assert one.memory_bytes is not None
        assert one.memory_bytes > 40 * MIB
