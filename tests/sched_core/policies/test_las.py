"""Least attained service approaches foreground-background."""

from __future__ import annotations

import pytest

from gpuslice.errors import ConfigError
from gpuslice.sched_core.policies.registry import make_policy


@pytest.mark.parametrize("quantum_s", [1.0, 0.1, 0.01])
def test_las_is_foreground_background_in_the_limit(simulate, quantum_s) -> None:
    """One device, durations 1, 2, 4, all at 0. Sharing, the first ends at 3, the others at 5 and 7."""
    outcome = simulate([(0, 1, 1), (0, 1, 2), (0, 1, 4)], "1x1", "las", quantum_s=quantum_s)
    assert outcome.finish_s == pytest.approx([3, 5, 7], abs=2.01 * quantum_s)


def test_a_newcomer_runs_alone_until_it_caught_up(simulate) -> None:
    outcome = simulate([(0, 1, 6), (4, 1, 6)], "1x1", "las", quantum_s=0.5)
    spans = [(span.job, span.start_s, span.end_s) for span in outcome.spans]
    assert spans[0] == (0, 0, 4)
    assert spans[1][:2] == (1, 4)
    assert spans[1][2] == pytest.approx(8, abs=0.5)
    assert outcome.finish_s == pytest.approx([11.5, 12], abs=0.5)


def test_the_quantum_must_be_a_time() -> None:
    with pytest.raises(ConfigError, match="quantum_s=0"):
        make_policy("las", {"quantum_s": "0"})
