"""How long the experiment with one pair takes, and how much of that is measuring."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

JOBS = Path(__file__).parent / "jobs"
SECONDS, REPEATS = 1.0, 2


def test_pair(benchmark: Any, tmp_path: Path) -> None:
    """Two scripts alone, packed and sliced, in two rounds."""
    output = tmp_path / "pair.json"
    words = ["colocate", str(JOBS / "mlp.py"), str(JOBS / "loader_bound.py"), "--json", str(output)]
    words += ["--seconds", str(SECONDS), "--turn", "0.25", "--repeats", str(REPEATS)]
    environ = {**os.environ, "GPUSLICE_STATE_DIR": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}

    def pair() -> None:
        subprocess.run([sys.executable, "-m", "gpuslice", *words], env=environ, check=True)

    benchmark.pedantic(pair, rounds=1)
    found = json.loads(output.read_text(encoding="utf-8"))
    trials = found["trials"]
    measured_s = sum(trial["runs"][0]["seconds"] for trial in trials if trial["runs"])
    spent_s = sum(trial["wall_s"] for trial in trials)
    benchmark.extra_info["trials"] = len(trials)
    benchmark.extra_info["seconds_a_trial"] = spent_s / len(trials)
    benchmark.extra_info["share_of_the_time_measured"] = measured_s / spent_s
