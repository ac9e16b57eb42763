"""Round robin."""

from __future__ import annotations

import pytest

from gpuslice.errors import ConfigError
from gpuslice.sched_core.policies.registry import make_policy


def test_turns(simulate) -> None:
    outcome = simulate([(0, 1, 4), (0, 1, 3), (0, 1, 2)], "1x1", "rr", quantum_s=2)
    spans = [(span.job, span.start_s, span.end_s) for span in outcome.spans]
    assert spans == [(0, 0, 2), (1, 2, 4), (2, 4, 6), (0, 6, 8), (1, 8, 9)]


def test_alone_nobody_is_disturbed(simulate) -> None:
    outcome = simulate([(0, 2, 50), (0, 2, 50)], "1x4", "rr", quantum_s=1)
    assert outcome.events == 2
    assert outcome.preemptions.sum() == 0


def test_a_newcomer_waits_for_one_round_at_most(simulate) -> None:
    rows = [(0, 1, 100)] * 3 + [(10.5, 1, 100)]
    outcome = simulate(rows, "1x1", "rr", quantum_s=1)
    assert outcome.first_start_s[3] <= 10.5 + 3 + 1


def test_a_gang_finds_its_devices_free(simulate) -> None:
    rows = [(0, 1, 100)] * 4 + [(1, 4, 10)]
    outcome = simulate(rows, "1x4", "rr", quantum_s=5)
    assert outcome.first_start_s[4] == 5


def test_the_quantum_must_be_a_time() -> None:
    with pytest.raises(ConfigError, match="quantum_s=-1"):
        make_policy("rr", {"quantum_s": -1.0})
