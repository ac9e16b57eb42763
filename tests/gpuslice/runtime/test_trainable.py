"""Whose first optimizer steps tell what a job trains."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch

from gpuslice.profiler.skew import Skew
from gpuslice.runtime.threads.training_thread import TrainingThread
from gpuslice.runtime.trainable import FIRST_STEPS, report_skew


def trains(sizes: tuple[int, ...], steps: int = FIRST_STEPS) -> Callable[[], None]:
    """Makes so many steps of a model with tensors of these sizes."""

    def train() -> None:
        tensors = [torch.zeros(size, requires_grad=True) for size in sizes]
        optimizer = torch.optim.SGD(tensors)
        for _ in range(steps):
            optimizer.step()

    return train


def test_steps_of_another_thread_are_not_the_job_s() -> None:
    told: list[Skew] = []
    report_skew(told.append, TrainingThread())
    trains((4, 4), steps=1)()
    other = threading.Thread(target=trains((100,)))
    other.start()
    other.join()
    assert told == []
    trains((4, 12), steps=FIRST_STEPS - 1)()
    assert [skew.tensors for skew in told] == [2]
    trains((4, 4))()
    assert len(told) == 1


def test_steps_of_a_fork_are_not_the_job_s() -> None:
    told: list[Skew] = []
    report_skew(told.append, TrainingThread())
    pid = os.fork()
    if pid == 0:
        trains((100,))()
        os._exit(len(told))
    assert os.waitpid(pid, 0)[1] == 0
    trains((4, 12))()
    assert len(told) == 1
