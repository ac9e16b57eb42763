"""Worlds of real processes with gloo: 1 -> 2 -> 3 -> 1 ranks, and what becomes of samples and losses."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpuslice.conftest import DEADLINE_S, Workshop

from . import training

SCRIPT = Path(training.__file__)
#: Float32's unit roundoff.
ROUNDOFF = 2.0**-24
STEPS = training.EPOCHS * -(-training.LENGTH // training.BATCH)
GROWN = "0:2,3:3,7:1"

Lines = list[dict[str, Any]]


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def start(workshop: Workshop, ranks: int, *words: str, run: bool = False) -> list[subprocess.Popen[str]]:
    """The ranks as a launcher starts them."""
    command = [sys.executable, str(SCRIPT), *words]
    if run:
        command = workshop.command("--job", "elastic", "--checkpoint-every", "2", str(SCRIPT), *words)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(ranks)}
    here = workshop.environ
    try:
        found = []
        for rank in range(ranks):
            workshop.environ = {**here, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            found.append(workshop.start(command, stderr=subprocess.PIPE))
        return found
    finally:
        workshop.environ = here


def finish(processes: list[subprocess.Popen[str]]) -> None:
    try:
        for process in processes:
            _, err = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, err
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


def train(workshop: Workshop, ranks: int, begin: int, schedule: str, *words: str) -> list[Lines]:
    """What each rank wrote down."""
    path = workshop.directory / "log"
    finish(start(workshop, ranks, str(path), str(begin), schedule, *words))
    return logs(path, ranks)


def logs(path: Path, ranks: int) -> list[Lines]:
    files = (path.with_name(f"{path.name}.{rank}") for rank in range(ranks))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def check_epochs(written: list[Lines]) -> None:
    """Every sample was seen exactly once an epoch, by one rank or another."""
    for epoch in range(training.EPOCHS):
        seen = Counter(
            index
            for lines in written
            for line in lines
            if line.get("epoch") == epoch
            for index in line["seen"]
        )
        assert seen == Counter(range(training.LENGTH))


def check_equal(written: list[Lines]) -> None:
    """All ranks that train together hold the same bits, and report the same losses."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for line in (line for lines in written for line in lines if "step" in line):
        by_step.setdefault(line["step"], []).append(line)
    assert sorted(by_step) == list(range(len(by_step)))
    for lines in by_step.values():
        assert len(lines) == lines[0]["width"]
        assert len({(line["state"], line["loss"], line["samples"]) for line in lines}) == 1


def widths(lines: Lines) -> list[int]:
    return [line["width"] for line in lines if "width" in line]


def gradient_bound(lines: Lines) -> float:
    """How far the gradients that two runs compute for the same weights may be apart, in the 2-norm.

    Each entry is a sum of ``n`` products of numbers that are themselves sums of ``k`` products, in any order.
    Its rounding error is at most ``gamma(n + k + ...)`` times the sum of the absolute values, in both runs
    (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
    """
    inputs, targets = (part.double().abs() for part in training.data())
    largest = max(max(map(abs, line["weight"])) + abs(line["bias"]) for line in lines) + 1.0
    residuals = inputs.sum(1) * largest + largest + targets
    columns = torch.cat([inputs, torch.ones(len(inputs), 1)], 1).double()
    # The mean over any batch is at most the largest row.
    magnitude = 2.0 * float((columns * residuals[:, None]).amax(0).norm())
    operations = training.BATCH + training.FEATURES + 8
    return 2.0 * operations * ROUNDOFF / (1.0 - operations * ROUNDOFF) * magnitude


@pytest.mark.slow
def test_resized_training_equals_the_fixed_one_up_to_the_order_of_sums(warm_workshop: Workshop) -> None:
    """Gradient descent on a convex quadratic with a rate below 2 / curvature does not amplify errors.

    After ``k`` steps the weights are at most ``k * rate * bound`` apart, losses by the slope times that.
    """
    resized = train(warm_workshop, 3, 1, GROWN)
    (fixed,) = train(warm_workshop, 1, 0, "")
    check_epochs(resized)
    check_equal(resized)
    assert widths(resized[0]) == [1, 2, 2, 2, 3, 3, 3, 3, *[1] * (STEPS - 8)]
    inputs, _ = training.data()
    columns = torch.cat([inputs, torch.ones(len(inputs), 1)], 1).double()
    curvature = 2.0 * float((columns**2).sum(1).max())  # of any batch's mean
    assert training.RATE * curvature < 2.0
    bound = gradient_bound(fixed[:-1])
    for step, (ours, theirs) in enumerate(zip(resized[0][:-1], fixed[:-1], strict=True)):
        apart = torch.tensor([*ours["weight"], ours["bias"]]) - torch.tensor(
            [*theirs["weight"], theirs["bias"]]
        )
        weights_bound = (step + 1) * training.RATE * (bound + ROUNDOFF * 4)
        assert float(apart.double().norm()) <= weights_bound
        # The slope of a batch's loss is at most 2 |residual| |x|: the bound without its roundoff.
        slope = bound / (2.0 * (training.BATCH + training.FEATURES + 8) * ROUNDOFF)
        assert abs(ours["loss"] - theirs["loss"]) <= slope * weights_bound + bound
    assert weights_bound < 1e-3, "the bound says something"
    assert abs(resized[0][0]["loss"] - resized[0][-2]["loss"]) > 0.1, "it learns something"


@pytest.mark.slow
def test_the_learning_rate_grows_with_the_batch(warm_workshop: Workshop) -> None:
    resized = train(warm_workshop, 2, 1, "1:2", "scaled", "momentum")
    check_epochs(resized)
    assert [line["samples"] for line in resized[0] if "samples" in line][:3] == [12, 12, 24]
    assert {line["rate"] for line in resized[0] if "rate" in line} == {training.RATE}
    assert resized[0][-1] == resized[1][-1]


@pytest.mark.slow
def test_a_job_that_was_killed_goes_on_with_another_number_of_ranks(warm_workshop: Workshop) -> None:
    """Rank 0's checkpoint is enough for all: the rest of the epoch is dealt out to whoever is there."""
    path = warm_workshop.directory / "log"
    first = start(warm_workshop, 2, str(path), "2", "", "momentum", "stop-at-7", run=True)
    for process in first:
        process.communicate(timeout=DEADLINE_S)
    assert {process.returncode for process in first} <= {-signal.SIGKILL}
    killed = logs(path, 2)
    finish(start(warm_workshop, 3, str(path), "3", "", "momentum", run=True))
    resumed = logs(path, 3)
    begins = resumed[0][0]["step"]
    assert 0 < begins <= 7
    kept = [[line for line in lines if line["step"] < begins] for lines in killed]
    check_epochs([*kept, *resumed])
    check_equal([[*kept[0], *resumed[0]], [*kept[1], *resumed[1]], resumed[2]])
