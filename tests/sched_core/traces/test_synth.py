"""Made-up traces."""

from __future__ import annotations

import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.traces.synth import SynthSpec, synthesize


def test_load_is_what_was_asked_for() -> None:
    trace = synthesize(SynthSpec(jobs=20_000, load=0.8, devices=64, sigma=1.0))
    service = sum(d * s for d, s in zip(trace.demand, trace.duration_s, strict=True))
    assert service / (trace.submit_s[-1] * 64) == pytest.approx(0.8, rel=0.03)


def test_same_seed_same_trace() -> None:
    first, second, other = (synthesize(SynthSpec(jobs=50, seed=seed)) for seed in (1, 1, 2))
    assert first.duration_s == second.duration_s != other.duration_s


@pytest.mark.parametrize("options", [{"jobs": 0}, {"jobs": 1, "load": 0}, {"jobs": 1, "median_s": -1}])
def test_impossible_numbers(options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        synthesize(SynthSpec(**options))
