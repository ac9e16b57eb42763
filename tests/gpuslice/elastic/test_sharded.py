"""FSDP2 parameters over 1 -> 2 -> 3 -> 1 ranks: every byte is there after each change."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch

from gpuslice.elastic.sharded import Sharded
from gpuslice.errors import UsageError
from tests.gpuslice.conftest import Workshop, finish_ranks

from ...patience import PATIENCE_S
from . import training
from .checks import Lines, check_close, check_epochs, check_equal, check_state, logs, widths

SCRIPT = Path(training.__file__).with_name("sharded_training.py")
STEPS = training.EPOCHS * -(-training.LENGTH // training.BATCH)
GROWN = "0:2,3:3,7:1"


def train(workshop: Workshop, ranks: int, begin: int, schedule: str, *words: str) -> list[Lines]:
    """What each rank wrote down."""
    path = workshop.directory / "log"
    for former in workshop.directory.glob("log.*"):
        former.unlink()
    command = [sys.executable, str(SCRIPT), str(path), str(begin), schedule, *words]
    finish_ranks(workshop.start_ranks(ranks, command))
    return logs(path, ranks)


@pytest.mark.slow
@pytest.mark.gangs
def test_resized_training_equals_the_fixed_one_up_to_the_order_of_sums(warm_workshop: Workshop) -> None:
    resized = train(warm_workshop, 3, 1, GROWN)
    (fixed,) = train(warm_workshop, 1, 0, "", "whole")
    check_epochs(resized)
    check_equal(resized)
    check_state(resized)
    assert widths(resized[0]) == [1, 2, 2, 2, 3, 3, 3, 3, *[1] * (STEPS - 8)]
    assert check_close(resized[0], fixed) < 1e-3
    parts = [[line["own"] for line in lines if line.get("width") == 3] for lines in resized]
    assert parts == [[4] * 4, [3] * 4, [2] * 4], "each has a part of the 9 parameters"


@pytest.mark.slow
@pytest.mark.gangs
def test_optimizer_and_schedule_are_the_same_bytes_after_each_change(warm_workshop: Workshop) -> None:
    resized = train(warm_workshop, 3, 1, GROWN, "adam")
    check_epochs(resized)
    check_equal(resized)
    check_state(resized)
    assert {line["width"] for line in resized[0] if "width" in line} == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.gangs
def test_a_job_that_was_killed_goes_on_with_another_number_of_ranks(warm_workshop: Workshop) -> None:
    """Rank 0's checkpoint has the whole state."""
    path, words = warm_workshop.directory / "log", ["adam"]
    options = ["--job", "sharded", "--continue-anyway", "--checkpoint-every", "2", str(SCRIPT)]
    first = warm_workshop.start_ranks(
        2, warm_workshop.command(*options, str(path), "2", "", "stop-at-7", *words)
    )
    for process in first:
        process.communicate(timeout=PATIENCE_S)
    assert {process.returncode for process in first} <= {-signal.SIGKILL}
    killed = logs(path, 2)
    path = warm_workshop.directory / "again"
    finish_ranks(warm_workshop.start_ranks(3, warm_workshop.command(*options, str(path), "3", "", *words)))
    resumed = logs(path, 3)
    begins = resumed[0][0]["step"]
    assert 0 < begins <= 7
    kept = [[line for line in lines if line["step"] < begins] for lines in killed]
    check_epochs([*kept, *resumed])
    check_state([*kept, *resumed])


def test_what_cannot_be_made_is_refused_by_name() -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(UsageError, match="no module"):
        Sharded({"optimizer": torch.optim.SGD(model.parameters(), 0.1)}, 1)
    with pytest.raises(UsageError, match="loader has no state_dict"):
        Sharded({"model": model, "loader": 3}, 1)
