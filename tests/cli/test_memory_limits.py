"""A job over its memory limit ends alone: its neighbours notice nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .conftest import Shell
from .test_training import STEADY, digest, finish, undisturbed

NEIGHBOUR = Path(__file__).parents[2] / "gpuslice" / "demo" / "jobs" / "wine.py"
STEPS = 60
#: Keeps within its limit until its sixth batch.
GREEDY = """
import torch
from torch.utils.data import DataLoader
kept = []
for batch in DataLoader(range(20)):
    kept.append(torch.ones((batch.item() // 5) * 400 * 2**18 + 2**18))
"""

pytestmark = [pytest.mark.slow, pytest.mark.trainings]


def test_a_job_over_its_limit_ends_alone(shell: Shell, tmp_path: Path) -> None:
    greedy = tmp_path / "greedy.py"
    greedy.write_text(GREEDY, encoding="utf-8")
    shell("up", "--devices", "cpu:1", "--quantum", "300ms")
    client = shell.client()
    words = [str(NEIGHBOUR), "--steps", str(STEPS)]
    neighbours = [client.submit(words, environ=STEADY, device_memory_bytes=1 << 30) for _ in range(2)]
    culprit = client.submit(
        [str(greedy)], environ=dict(os.environ), device_memory_bytes=100 << 20, max_restarts=2
    )
    ended = finish(client, [culprit, *neighbours])
    found = ended.pop(culprit)
    assert (found.state, found.failure, found.restarts) == ("failed", "resource", 0)
    assert "gpuslice: out of memory: the job's memory limit of 100.00 MiB" in found.reason
    assert "it asked for 401.00 MiB" in found.reason
    assert {name: job.state for name, job in ended.items()} == dict.fromkeys(neighbours, "succeeded")
    assert {digest(client, job) for job in neighbours} == {undisturbed(STEPS)}
    shell("down")
