"""Worlds of real processes with gloo: 1 -> 2 -> 3 -> 1 ranks, and what becomes of samples and losses."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpuslice.conftest import Workshop, finish_ranks

from ...patience import PATIENCE_S
from . import training
from .checks import Lines, check_close, check_epochs, check_equal, logs, widths

SCRIPT = Path(training.__file__)
STEPS = training.EPOCHS * -(-training.LENGTH // training.BATCH)
GROWN = "0:2,3:3,7:1"


def start(workshop: Workshop, ranks: int, *words: str, run: bool = False) -> list[subprocess.Popen[str]]:
    """The ranks as a launcher starts them."""
    command = [sys.executable, str(SCRIPT), *words]
    if run:
        flags = ("--continue-anyway", "--checkpoint-every", "2")
        command = workshop.command("--job", "elastic", *flags, str(SCRIPT), *words)
    return workshop.start_ranks(ranks, command)


def train(workshop: Workshop, ranks: int, begin: int, schedule: str, *words: str) -> list[Lines]:
    """What each rank wrote down."""
    path = workshop.directory / "log"
    for former in workshop.directory.glob("log.*"):
        former.unlink()
    finish_ranks(start(workshop, ranks, str(path), str(begin), schedule, *words))
    return logs(path, ranks)


@pytest.mark.slow
@pytest.mark.gangs
def test_resized_training_equals_the_fixed_one_up_to_the_order_of_sums(warm_workshop: Workshop) -> None:
    """Gradient descent on a convex quadratic with a rate below 2 / curvature does not amplify errors.

    After ``k`` steps the weights are at most ``k * rate * bound`` apart, losses by the slope times that.
    """
    resized = train(warm_workshop, 3, 1, GROWN)
    (fixed,) = train(warm_workshop, 1, 0, "")
    check_epochs(resized)
    check_equal(resized)
    assert widths(resized[0]) == [1, 2, 2, 2, 3, 3, 3, 3, *[1] * (STEPS - 8)]
    weights_bound = check_close(resized[0], fixed)
    assert weights_bound < 1e-3, "the bound says something"
    assert abs(resized[0][0]["loss"] - resized[0][-2]["loss"]) > 0.1, "it learns something"


@pytest.mark.slow
@pytest.mark.gangs
@pytest.mark.parametrize("momentum", [pytest.param("momentum", marks=pytest.mark.repeats), "inner"])
def test_the_learning_rate_grows_with_the_batch(warm_workshop: Workshop, momentum: str) -> None:
    resized = train(warm_workshop, 2, 1, "1:2", "scaled", momentum)
    check_epochs(resized)
    assert [line["samples"] for line in resized[0] if "samples" in line][:3] == [12, 12, 24]
    assert {line["rate"] for line in resized[0] if "rate" in line} == {training.RATE}
    assert resized[0][-1] == resized[1][-1]


@pytest.mark.slow
@pytest.mark.gangs
@pytest.mark.parametrize("momentum", [pytest.param("momentum", marks=pytest.mark.repeats), "inner"])
def test_a_job_that_was_killed_goes_on_with_another_number_of_ranks(
    warm_workshop: Workshop, momentum: str
) -> None:
    """Rank 0's checkpoint is enough for all: the rest of the epoch is dealt out to whoever is there."""
    path = warm_workshop.directory / "log"
    first = start(warm_workshop, 2, str(path), "2", "", momentum, "stop-at-7", run=True)
    for process in first:
        process.communicate(timeout=PATIENCE_S)
    assert {process.returncode for process in first} <= {-signal.SIGKILL}
    killed = logs(path, 2)
    path = warm_workshop.directory / "again"
    finish_ranks(start(warm_workshop, 3, str(path), "3", "", momentum, run=True))
    resumed = logs(path, 3)
    begins = resumed[0][0]["step"]
    assert 0 < begins <= 7
    assert resumed[0][0]["state"] == next(line["state"] for line in killed[0] if line["step"] == begins)
    kept = [[line for line in lines if line["step"] < begins] for lines in killed]
    check_epochs([*kept, *resumed])
    check_equal([[*kept[0], *resumed[0]], [*kept[1], *resumed[1]], resumed[2]])
