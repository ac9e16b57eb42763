"""The driver route: another process is taken off the simulated GPU whole, by the documented state machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import UUID

import cudasim
import pytest
import torch

from gpuslice.errors import (
    DeviceMemoryError,
    EnvironmentUnusableError,
    SuspendedStateError,
    SuspendRefusedError,
)
from gpuslice.kernels.driver import Process, ProcessState

from ..patience import PATIENCE_S

pytestmark = pytest.mark.whole_gpu

#: Says what it computed at every line that it reads; "hold" leaves work on a stream that does not end.
JOB = """
import sys, torch, cudasim
tensor = torch.arange(1 << 22, device="cuda:0")
print(tensor.sum().item(), flush=True)
for line in sys.stdin:
    if line.strip() == "hold":
        cudasim.runtime().cudasim_hold(None, 1)
        tensor.add_(0)
        print("held", flush=True)
        sys.stdin.readline()
        cudasim.runtime().cudasim_hold(None, 0)
    tensor.add_(1)
    print(tensor.sum().item(), tensor.device, flush=True)
"""
NBYTES = 8 << 22
SUM = (1 << 22) * ((1 << 22) - 1) // 2


@contextmanager
def job() -> Iterator[subprocess.Popen[str]]:
    """On this process's account, so that both see the same GPU."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", JOB], text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{SUM}\n"
            yield process
        finally:
            process.kill()


@contextmanager
def supervised(*words: str) -> Iterator[subprocess.Popen[str]]:
    """The same under ``gpuslice run --route driver``."""
    command = [sys.executable, "-m", "gpuslice", "run", "--route", "driver", "--", *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


def ask(process: subprocess.Popen[str], word: str = "") -> str:
    tell(process, word)
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], word: str = "") -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def test_a_process_leaves_its_gpu_and_comes_back() -> None:
    torch.cuda.init()
    with job() as running:
        process = Process(running.pid)
        taken = cudasim.used_bytes(0)
        process.lock(timeout_ms=20_000)
        assert process.state is ProcessState.LOCKED
        with pytest.raises(SuspendedStateError):
            process.lock()
        with pytest.raises(SuspendedStateError):
            process.restore()
        process.checkpoint()
        assert process.state is ProcessState.CHECKPOINTED
        assert taken - cudasim.used_bytes(0) >= NBYTES
        tell(running)  # its calls wait until it is unlocked
        process.restore()
        with pytest.raises(SuspendedStateError):
            process.restore()
        assert cudasim.used_bytes(0) == taken
        process.unlock()
        assert process.state is ProcessState.RUNNING
        assert running.stdout is not None
        assert running.stdout.readline().strip() == f"{SUM + (1 << 22)} cuda:0"


@contextmanager
def taken_but(left_bytes: int) -> Iterator[None]:
    """This process has all memory of the GPU but so much."""
    free_bytes, _ = torch.cuda.mem_get_info(0)
    others = torch.empty(free_bytes - left_bytes, dtype=torch.uint8, device="cuda:0")
    yield
    del others
    torch.cuda.empty_cache()


def test_after_a_restore_without_room_the_driver_refuses_all_others() -> None:
    torch.cuda.init()
    with job() as running:
        process = Process(running.pid)
        process.lock(timeout_ms=20_000)
        process.checkpoint()
        with taken_but(16 << 20), pytest.raises(DeviceMemoryError):
            process.restore()
        assert process.state is ProcessState.CHECKPOINTED
        with pytest.raises(EnvironmentUnusableError, match=r"304: .* cannot restore the process any more"):
            process.restore()


def test_without_room_an_adopted_process_stays_away_and_comes_back_later() -> None:
    torch.cuda.init()
    with job() as running:
        assert adopt(str(running.pid), "--suspend").returncode == 0
        with taken_but(16 << 20):
            done = adopt(str(running.pid), "--resume")
            assert (done.returncode, "bytes free, process" in done.stderr) == (3, True), done.stderr
        assert adopt(str(running.pid), "--resume").returncode == 0
        assert ask(running).startswith(str(SUM + (1 << 22)))


@pytest.mark.two_gpus
def test_a_move_exchanges_the_gpus() -> None:
    first, second = (UUID(str(torch.cuda.get_device_properties(index).uuid)) for index in (0, 1))
    with job() as running:
        process = Process(running.pid)
        process.lock(timeout_ms=20_000)
        process.checkpoint()
        before = cudasim.used_bytes(1)
        process.restore({first: second, second: first})
        process.unlock()
        assert cudasim.used_bytes(1) - before >= NBYTES
        assert ask(running) == f"{SUM + (1 << 22)} cuda:0"


@pytest.mark.simulated
def test_a_busy_process_is_not_locked() -> None:
    with job() as running:
        process = Process(running.pid)
        assert ask(running, "hold") == "held"
        with pytest.raises(SuspendRefusedError, match="busy"):
            process.lock(timeout_ms=50)
        assert process.state is ProcessState.RUNNING
        assert ask(running).startswith(str(SUM + (1 << 22)))


def adopt(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuslice", "adopt", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.two_gpus
def test_a_process_is_adopted_suspended_moved_and_resumed_from_the_command_line() -> None:
    torch.cuda.init()
    with job() as running:
        pid = str(running.pid)
        taken = cudasim.used_bytes(0)
        assert adopt(pid).stdout == f"process {pid}: running\n"
        done = adopt(pid, "--suspend", "--json")
        assert (done.returncode, done.stdout) == (0, f'{{"pid": {pid}, "state": "checkpointed"}}\n'), (
            done.stderr
        )
        assert taken - cudasim.used_bytes(0) >= NBYTES
        again = adopt(pid, "--suspend")
        assert (again.returncode, "suspended already" in again.stderr) == (2, True)
        before = cudasim.used_bytes(1)
        done = adopt(pid, "--resume", "--to", "cuda:0=cuda:1")
        assert (done.returncode, done.stdout) == (0, f"process {pid}: running\n"), done.stderr
        assert cudasim.used_bytes(1) - before >= NBYTES
        assert ask(running) == f"{SUM + (1 << 22)} cuda:0"


@pytest.mark.simulated
def test_a_process_without_cuda_and_a_busy_one_are_refused_and_go_on() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        done = adopt(str(idle.pid), "--suspend")
        assert (done.returncode, "uses no CUDA" in done.stderr) == (3, True)
        idle.communicate(b"\n")
    with job() as running:
        assert ask(running, "hold") == "held"
        done = adopt(str(running.pid), "--suspend", "--timeout", "0.05")
        assert (done.returncode, "still busy" in done.stderr) == (3, True)
        assert ask(running).startswith(str(SUM + (1 << 22)))


def test_a_command_under_the_driver_route_leaves_its_gpu_while_it_is_stopped() -> None:
    """A shell starts the script, so that the one with CUDA is a grandchild."""
    torch.cuda.init()
    with supervised("sh", "-c", '"$@"; exit 7', "sh", sys.executable, "-c", JOB) as running:
        assert line(running.stdout) == str(SUM)
        taken = cudasim.used_bytes(0)
        running.send_signal(signal.SIGTSTP)
        assert line(running.stderr) == "gpuslice: suspended 1 process"
        os.waitid(os.P_PID, running.pid, os.WSTOPPED)
        assert taken - cudasim.used_bytes(0) >= NBYTES
        # The driver's threads would take its signals, and SIGCONT would be lost.
        assert "libcuda.so" not in Path(f"/proc/{running.pid}/maps").read_text()
        tell(running)
        running.send_signal(signal.SIGCONT)
        assert line(running.stderr) == "gpuslice: resumed 1 process"
        assert line(running.stdout) == f"{SUM + (1 << 22)} cuda:0"
        assert running.stdin is not None
        running.stdin.close()
        assert running.wait(PATIENCE_S) == 7


def test_signals_go_to_the_command_and_its_death_is_told() -> None:
    with supervised(sys.executable, "-c", JOB) as running:
        assert line(running.stdout) == str(SUM)
        running.terminate()
        assert running.wait(PATIENCE_S) == 128 + signal.SIGTERM


def test_what_the_driver_route_cannot_have_is_refused() -> None:
    for words, code, why in (
        (("--suspend-every", "3"), 2, "not inside of the process"),
        (("--device", "cuda:1"), 2, "set CUDA_VISIBLE_DEVICES"),
        (("--device", "cpu"), 3, "cannot be taken on cpu"),
    ):
        command = [sys.executable, "-m", "gpuslice", "run", "--route", "driver", *words, "--", "true"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert (done.returncode, why in done.stderr) == (code, True), done.stderr
