"""SIGTSTP and SIGCONT: a job without a scheduler is off its device while stopped, and nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from ..patience import PATIENCE_S
from .conftest import Workshop

TRAIN = """
import hashlib, os, sys, time
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1000, 500), torch.nn.Dropout(0.1), torch.nn.Linear(500, 1))
optimizer = torch.optim.Adam(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(160, 1000), torch.randn(160, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=int(sys.argv[1]))
for epoch in range(2):
    for inputs, targets in loader:
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", flush=True)
        time.sleep(0.02)
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(digest.hexdigest())
"""
STATE_BYTES = 3 * 4 * 500_000


@contextmanager
def begun(workshop: Workshop, *options: str, workers: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A training that has made five steps. It is killed if it has not ended."""
    script = str(workshop.write("train.py", TRAIN))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = workshop.command(*options, script, str(workers))
    with workshop.start(command, {"OMP_NUM_THREADS": "1"}, **pipes) as process:
        try:
            assert process.stdout is not None
            for _ in range(5):
                assert process.stdout.readline() == "step\n"
            yield process
        finally:
            process.kill()


def digest_of(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.splitlines()[-1]


@pytest.fixture
def undisturbed(warm_workshop: Workshop) -> str:
    with begun(warm_workshop) as process:
        return digest_of(process)


def await_stop(process: subprocess.Popen[str]) -> None:
    """Wait until the process has stopped. It must not end instead."""
    ends_s = time.monotonic() + PATIENCE_S
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert process.poll() is None, "it ended"
        assert time.monotonic() < ends_s, "it does not stop"
        time.sleep(0.01)


def stored_bytes(workshop: Workshop) -> int:
    return sum(path.stat().st_size for path in workshop.ramdisk.rglob("*.gsnp"))


@pytest.mark.slow
def test_a_stopped_training_is_off_its_device_and_goes_on_bit_for_bit(
    warm_workshop: Workshop, undisturbed: str
) -> None:
    with begun(warm_workshop, workers=2) as process:
        for _ in range(2):
            process.send_signal(signal.SIGTSTP)
            await_stop(process)
            assert stored_bytes(warm_workshop) > STATE_BYTES
            process.send_signal(signal.SIGSTOP)  # as Slurm and PBS do after some seconds
            process.send_signal(signal.SIGCONT)
            assert process.stdout is not None
            process.stdout.readline()
        assert digest_of(process) == undisturbed


@pytest.mark.slow
def test_signals_at_any_moment_lose_nothing(warm_workshop: Workshop, undisturbed: str) -> None:
    draw = random.Random(1)
    with begun(warm_workshop) as process:
        for _ in range(12):
            process.send_signal(draw.choice([signal.SIGTSTP, signal.SIGSTOP]))
            time.sleep(draw.uniform(0.0, 0.05))
            process.send_signal(draw.choice([signal.SIGTSTP, signal.SIGSTOP, signal.SIGCONT]))
            time.sleep(draw.uniform(0.0, 0.02))
            process.send_signal(signal.SIGCONT)
        ended = threading.Event()

        def wake() -> None:  # the last one of a storm may have come just before the stop
            while not ended.wait(0.1):
                # Not by `send_signal`, which asks for its end, as the other thread does.
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)

        waking = threading.Thread(target=wake)
        waking.start()
        try:
            assert digest_of(process) == undisturbed
        finally:
            ended.set()
            waking.join()


@pytest.mark.slow
def test_without_room_for_its_state_it_stops_where_it_is(warm_workshop: Workshop, undisturbed: str) -> None:
    with begun(warm_workshop, "--ramdisk-limit", "1M") as process:
        process.send_signal(signal.SIGTSTP)
        await_stop(process)
        assert not stored_bytes(warm_workshop)
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate()
    assert out.splitlines()[-1] == undisturbed
    assert "stopped on its device" in err


def test_a_script_with_a_handler_of_its_own_keeps_it(warm_workshop: Workshop) -> None:
    script = TRAIN.replace(
        "torch.manual_seed(0)",
        "import signal; signal.signal(signal.SIGTSTP, lambda *_: print('mine'))\ntorch.manual_seed(0)",
    ).replace('print("step", flush=True)', "os.kill(os.getpid(), signal.SIGTSTP)")
    done = warm_workshop.gpuslice_run(str(warm_workshop.write("own.py", script)), "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mine") == 40
