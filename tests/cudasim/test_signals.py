"""The signals of Slurm and PBS to a training on the GPU: SIGTSTP, SIGSTOP of the whole group, SIGCONT."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from ..gpuslice.conftest import Workshop
from ..patience import PATIENCE_S

#: Words: the width of the model, whose state has 24 bytes for each of its square. After each step it waits
#: for a line on stdin.
TRAIN = """
import hashlib, sys, torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
width = int(sys.argv[1])
layers = torch.nn.Linear(width, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, width)
model = torch.nn.Sequential(*layers).to("cuda:0")
optimizer = torch.optim.Adam(model.parameters())
data = TensorDataset(torch.randn(16, width))
for (batch,) in DataLoader(data, batch_size=2, shuffle=True, num_workers=1):
    model(batch.to("cuda:0")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", flush=True)
    sys.stdin.readline()
digest = hashlib.sha256(repr(torch.cuda.get_rng_state(0).tolist()).encode())
for value in model.state_dict().values():
    digest.update(value.cpu().numpy().tobytes())
print(digest.hexdigest(), flush=True)
"""
#: GPUSLICE_SIGNALS_WIDTH=2050 is a state of 100 MB, 6500 one of 1 GB.
WIDTH = int(os.environ.get("GPUSLICE_SIGNALS_WIDTH", "600"))
#: How long after SIGTSTP SIGSTOP follows, in seconds. None: once the training is off its GPU.
MOMENTS_S = (None, 2.0, None, 0.0, 0.02)


def test_a_group_that_is_stopped_goes_on_bit_for_bit(warm_workshop: Workshop) -> None:
    script, report = str(warm_workshop.write("train.py", TRAIN)), warm_workshop.directory / "report.json"
    undisturbed = warm_workshop.execute([sys.executable, script, str(WIDTH)], stdin="")
    assert undisturbed.returncode == 0, undisturbed.stderr
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = warm_workshop.command("--report", str(report), script, str(WIDTH))
    with warm_workshop.start(command, **pipes) as process:
        try:
            _await_step(process)
            for after_s in MOMENTS_S:
                _stop_and_wake(process, after_s)
            out, err = _finish(process)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == undisturbed.stdout.splitlines()[-1]
    assert _freed_bytes(report) > 2 * 24 * WIDTH**2


def _stop_and_wake(process: subprocess.Popen[str], after_s: float | None) -> None:
    """Send the signals to the training, which waits for a line, and let it make a step meanwhile."""
    assert process.stdin is not None
    group = _group(process)
    _send(group, signal.SIGTSTP)
    process.stdin.write("\n")
    process.stdin.flush()
    if after_s is None:
        _await_stop(process)
    else:
        time.sleep(after_s)
    _send(group, signal.SIGSTOP)
    _send(group, signal.SIGCONT)
    _await_step(process)


def _await_step(process: subprocess.Popen[str]) -> None:
    """Wait for a step. Wake the group meanwhile: SIGCONT may have come just before one stopped itself."""
    assert process.stdout is not None
    ends_s = time.monotonic() + PATIENCE_S
    while not select.select([process.stdout], [], [], 0.2)[0]:
        assert time.monotonic() < ends_s, "it does not go on"
        _send(_group(process), signal.SIGCONT)
    assert process.stdout.readline() == "step\n"


def _group(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the training and its loader's worker: all that a queue signals."""
    training = psutil.Process(process.pid)
    return [training, *training.children(recursive=True)]


def _send(group: list[psutil.Process], number: signal.Signals) -> None:
    for process in group:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _await_stop(process: subprocess.Popen[str]) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert process.poll() is None, "it ended"
        assert time.monotonic() < ends_s, "it does not stop"
        time.sleep(0.01)


def _finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what the training prints when no line holds it back any more. Wake its worker meanwhile."""
    ends_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return process.communicate(timeout=0.2)
        except subprocess.TimeoutExpired:
            assert time.monotonic() < ends_s, "it does not end"
            with suppress(psutil.NoSuchProcess):
                _send(_group(process), signal.SIGCONT)


def _freed_bytes(report: Path) -> int:
    """Return the bytes of device memory that all switches have freed."""
    return sum(one["bytes_freed"] for one in json.loads(report.read_text())["switches"])
