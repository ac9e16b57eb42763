"""Signals that come in one moment, or while the job's state moves: none is lost, nothing waits for ever."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gpuslice.agent.job_control import JobControl
from gpuslice.config import Settings
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime import trainings
from gpuslice.runtime.boundaries import NEVER, BoundaryCounter
from gpuslice.runtime.ending import deliver
from gpuslice.runtime.runtime import Runtime
from gpuslice.runtime.threads.main_thread import MainThreadStuckError

STOP, WAKE = signal.SIGTSTP, signal.SIGCONT


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Runtime]:
    settings = Settings(device="cpu", ramdisk_dir=str(tmp_path / "ramdisk"))
    runtime = Runtime(settings, RankIdentity(), BoundaryCounter())
    yield runtime
    trainings.close(runtime)


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals with which the process would have stopped itself. It is woken at once."""
    sent: list[int] = []

    def kill(pid: int, number: int) -> None:
        sent.append(number)
        assert len(sent) < 9, "it stops again and again"
        deliver([WAKE])

    monkeypatch.setattr(os, "kill", kill)
    return sent


@pytest.fixture
def control(job: Runtime, stops: list[int]) -> Iterator[JobControl]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (STOP, WAKE)}
    control = JobControl(job)
    control.start()
    assert callable(signal.getsignal(STOP))
    yield control
    for number, handler in before.items():
        signal.signal(number, handler)


def amid(act: Callable[..., object], *numbers: int) -> Callable[..., object]:
    """Return ``act`` with signals that arrive while it runs, all of them during one call of C code."""
    waiting = [numbers]

    def acting(*args: object, **options: object) -> object:
        if waiting:
            deliver(waiting.pop())
        return act(*args, **options)

    return acting


def test_a_stop_and_a_wake_of_one_moment_let_it_run(
    job: Runtime, control: JobControl, stops: list[int]
) -> None:
    deliver([STOP, WAKE])
    assert control.at_boundary(1) == []
    assert job.boundaries.stop_at == NEVER
    assert not stops


def test_a_stop_right_after_a_wake_is_obeyed(job: Runtime, control: JobControl, stops: list[int]) -> None:
    deliver([WAKE])
    deliver([STOP])
    assert control.at_boundary(1) == []
    assert stops == [signal.SIGSTOP]


def test_a_stop_and_a_wake_while_it_leaves_its_device_let_it_come_back(
    job: Runtime, control: JobControl, stops: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.arange(4096.0)
    monkeypatch.setattr(job.suspension, "suspend", amid(job.suspension.suspend, STOP, WAKE))
    deliver([STOP])
    assert control.at_boundary(1) == []
    assert not stops, "nobody would wake it again"
    assert torch.equal(weights, torch.arange(4096.0))
    assert job.boundaries.stop_at == NEVER


def test_a_stop_while_it_comes_back_is_obeyed_at_the_next_boundary(
    job: Runtime, control: JobControl, stops: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.arange(4096.0)
    monkeypatch.setattr(job.suspension, "resume", amid(job.suspension.resume, STOP))
    deliver([STOP])
    deliver(control.at_boundary(1))
    assert job.boundaries.stop_at == 0
    deliver(control.at_boundary(2))
    assert stops == [signal.SIGSTOP] * 2
    assert torch.equal(weights, torch.arange(4096.0))
    assert job.boundaries.stop_at == NEVER


def test_the_training_thread_stops_once_if_the_main_one_runs_no_handler(
    job: Runtime, control: JobControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def park(act: object) -> list[int]:
        raise MainThreadStuckError("it is in C code", "train in the main thread")

    stopped: list[tuple[int, int]] = []
    monkeypatch.setattr(job.suspension.main_thread, "park", park)
    monkeypatch.setattr(signal, "pthread_kill", lambda *sent: stopped.append(sent))
    deliver([STOP])
    training = threading.Thread(target=control.at_boundary, args=[1])
    training.start()
    training.join()
    assert stopped == [(training.ident, signal.SIGSTOP)]
    assert job.boundaries.stop_at == NEVER
