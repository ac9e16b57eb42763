"""A boundary at which a collective is pending is none: its buffer is being written."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import Workshop, finish_ranks

SCRIPT = Path(__file__).with_name("pending_collective.py")


def test_a_rank_with_a_pending_collective_is_suspended_at_its_next_boundary(
    warm_workshop: Workshop,
) -> None:
    command = warm_workshop.command("--suspend-at", "2", "--report", "r.json", str(SCRIPT))
    finish_ranks(warm_workshop.start_ranks(2, command))
    reports = [json.loads(file.read_text()) for file in warm_workshop.directory.glob("r*.json")]
    found = {report["rank"]: [switch["boundary"] for switch in report["switches"]] for report in reports}
    assert found == {0: [3], 1: [2]}
