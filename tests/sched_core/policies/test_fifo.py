"""Orders that never change."""

from __future__ import annotations


def test_fifo_blocks_and_fjf_passes_over(simulate) -> None:
    rows = [(0, 1, 10), (1, 2, 5), (2, 1, 3)]
    assert simulate(rows, "1x2", "fifo").first_start_s.tolist() == [0, 10, 15]
    assert simulate(rows, "1x2", "fjf").first_start_s.tolist() == [0, 10, 2]


def test_fifo_blocks_behind_a_job_that_cannot_be_placed(simulate) -> None:
    """Nodes of two: from 1 on, one device is free on the first node, and 2 wants two on one node."""
    rows = [(0, 1, 10), (0, 2, 4), (1, 2, 5), (2, 1, 1)]
    outcome = simulate(rows, "2x2", "fifo", placement="consolidated")
    assert outcome.first_start_s.tolist() == [0, 0, 4, 4]


def test_smallest_preempts(simulate) -> None:
    outcome = simulate([(0, 2, 10), (1, 1, 3)], "1x2", "smallest")
    assert outcome.first_start_s.tolist() == [0, 1]
    assert outcome.finish_s.tolist() == [13, 4]
