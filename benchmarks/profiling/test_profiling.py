"""What recording costs a step: all hooks of ``gpuslice profile`` on a step that does nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpuslice.config import Settings
from gpuslice.hooks.profiling import Profiling
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.runtime import Runtime

STEPS = 2_000
STEP_S = 0.01


@pytest.mark.parametrize("kind", ["plain", "recorded"])
def test_step(benchmark: Any, kind: str, tmp_path: Path) -> None:
    boundaries = BoundaryCounter()
    job = Runtime(Settings(profile=str(tmp_path / "profile.json")), RankIdentity(), boundaries)
    profiling = Profiling(job)
    if kind == "recorded":
        boundaries.recorder = profiling.at_boundary
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])

    def nothing(_: object) -> None:
        """A batch that is there at once."""

    fetch = profiling.timed(nothing) if kind == "recorded" else nothing

    def steps() -> None:
        for _ in range(STEPS):
            boundaries.fetching()
            fetch(None)
            boundaries.stepped()
            if kind == "recorded":
                profiling.stepped(optimizer, (), {})

    benchmark.pedantic(steps, rounds=15, warmup_rounds=2)
    step_s = benchmark.stats.stats.median / STEPS
    benchmark.extra_info["us_per_step"] = step_s * 1e6
    benchmark.extra_info["share_of_10_ms"] = step_s / STEP_S
