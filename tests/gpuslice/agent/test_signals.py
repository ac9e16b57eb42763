"""A parked job gets a signal: real scripts in their processes, a real ROUTER socket here."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from gpuslice.wire import (
    Bye,
    Progress,
)

from ..conftest import Workshop
from .scripted_scheduler import ENDLESS, TRAIN, ScriptedScheduler, end, job


def test_ctrl_c_while_parked_gives_the_script_its_state_back(
    workshop: Workshop, scheduler: ScriptedScheduler
) -> None:
    with job(workshop, scheduler, ENDLESS) as process:
        scheduler.welcome()
        scheduler.grant(1)
        scheduler.park(1)
        process.send_signal(signal.SIGINT)
        scheduler.hear(Bye)
        code, _, err = end(process)
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in err


#: Put before the loop of ``TRAIN``: handlers that look at the model, which has no memory in a parked job.
HANDLERS = """
import os, signal
def look(signum, frame):
    whole = all(p.untyped_storage().nbytes() and bool(p.isfinite().all()) for p in model.parameters())
    print(signal.Signals(signum).name, whole, flush=True)
def leave(signum, frame):
    look(signum, frame)
    sys.exit(7)
signal.signal(signal.SIGUSR1, look)
signal.signal(signal.SIGHUP, look)
signal.signal(signal.SIGTERM, leave)
"""


@contextmanager
def job_with_handlers(
    workshop: Workshop, scheduler: ScriptedScheduler
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A job that is parked, and the boundary it is parked at."""
    begin = 'print("started", flush=True)'
    assert begin in TRAIN
    with job(workshop, scheduler, ENDLESS, script=TRAIN.replace(begin, HANDLERS + begin)) as process:
        assert process.stdout is not None
        scheduler.welcome()
        scheduler.grant(1)
        assert process.stdout.readline() == "started\n"
        yield process, scheduler.park(1).boundary


def test_a_handler_waits_for_the_lease_that_brings_the_state_back(
    workshop: Workshop, scheduler: ScriptedScheduler
) -> None:
    with job_with_handlers(workshop, scheduler) as (process, boundary):
        assert process.stdout is not None
        process.send_signal(signal.SIGUSR1)
        for _ in range(2):
            assert scheduler.hear(Progress).boundary == boundary
        scheduler.grant(2)
        assert process.stdout.readline() == "SIGUSR1 True\n"
        scheduler.hear(Progress, lambda progress: progress.boundary > boundary)


def test_a_script_that_is_asked_to_end_while_parked_can_do_so_with_its_state(
    workshop: Workshop, scheduler: ScriptedScheduler
) -> None:
    with job_with_handlers(workshop, scheduler) as (process, _):
        process.send_signal(signal.SIGTERM)
        scheduler.hear(Bye)
        code, out, _ = end(process)
    assert (code, out) == (7, "SIGTERM True\n")


def test_a_script_that_goes_on_parks_at_its_next_boundary(
    workshop: Workshop, scheduler: ScriptedScheduler
) -> None:
    with job_with_handlers(workshop, scheduler) as (process, boundary):
        assert process.stdout is not None
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "SIGHUP True\n"
        scheduler.hear(Progress, lambda progress: progress.boundary == boundary + 1)
        for _ in range(2):
            assert scheduler.hear(Progress).boundary == boundary + 1
        assert scheduler.grant(2).boundary == boundary + 1
        scheduler.hear(Progress, lambda progress: progress.boundary > boundary + 1)
