"""Trainings in other threads than the main one: suspended at their boundaries, they change no bit."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import Workshop

SCRIPT = Path(__file__).with_name("training_threads.py")


def test_a_training_is_suspended_in_whichever_thread_it_runs(warm_workshop: Workshop) -> None:
    plain = warm_workshop.python(str(SCRIPT))
    done = warm_workshop.gpuslice_run("--suspend-every", "3", "--report", "report.json", str(SCRIPT))
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    report = json.loads((warm_workshop.directory / "report.json").read_text())
    # 2 or 4 epochs of 8 batches, the same as in the main thread.
    boundaries = report["totals"]["boundaries"]
    assert boundaries > 300
    # More if two threads come to the same one at once.
    assert len(report["switches"]) >= boundaries // 3


#: Torch is imported in the thread; the main thread reacts to nothing.
UNREACHABLE = """
import ctypes, threading
libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)

def train():
    import torch
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1)
    try:
        for _ in range(40):
            weight.sum().backward()
            optimizer.step()
    finally:
        libc.pthread_mutex_unlock(lock)

libc.pthread_mutex_lock(lock)
thread = threading.Thread(target=train, name="training")
thread.start()
libc.pthread_mutex_lock(lock)
thread.join()
"""


def test_where_the_main_thread_does_not_react_that_is_said(warm_workshop: Workshop) -> None:
    script = warm_workshop.write("unreachable.py", UNREACHABLE)
    done = warm_workshop.gpuslice_run("--suspend-every", "3", str(script))
    assert "thread 'training' trains, and the main thread, which would park, does not react" in done.stderr
