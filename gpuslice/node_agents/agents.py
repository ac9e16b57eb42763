"""What the scheduler wants of an engine, each in a process of its own: it survives whatever becomes of that.

    python -m gpuslice.node_agents.agents find             the nodes that can be used
    python -m gpuslice.node_agents.agents begin            an agent on each
    python -m gpuslice.node_agents.agents end              what is left of them ends
    python -m gpuslice.node_agents.agents bring JOB FILE   a job's newest snapshot to the nodes of its ranks

    python -m gpuslice.node_agents.agents standby ssh|ray  the last of these, whose words come by stdin

Each reads a ``Wanted`` from stdin or that file, as JSON. The first three write an ``Answer`` to stdout; the
last one writes there how far it has come (``transfers.tell_progress``).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from gpuslice.errors import GpusliceError, UsageError
from gpuslice.nodes.plan import Wanted
from gpuslice.sched_core.nodes.transfers import UNREACHABLE, tell_progress

from .engine import Engine

#: Wait before a node is reported as unreachable; the caller then tries again.
_UNREACHABLE_S = 5.0
#: prctl(2)
_PR_SET_PDEATHSIG = 1


@contextmanager
def engine_for(wanted: Wanted) -> Iterator[Engine]:
    """Yield the engine of that request, connected."""
    if wanted.hosts:
        from .ssh_engine import SshEngine

        yield SshEngine(wanted)
        return
    from gpuslice.nodes.ray_nodes import connected

    from .ray_engine import RayEngine

    with connected(wanted.address or None):
        yield RayEngine(wanted)


@contextmanager
def _answers_alone() -> Iterator[BinaryIO]:
    """Yield the real stdout. Whatever else is printed meanwhile goes to stderr: engines print at times."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        yield answers


def _forget_messages() -> None:
    """Remove what Ray has printed from stderr, if that is a file: all in it is taken for the reason."""
    with suppress(OSError):
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


def _end_with_parent() -> None:
    """Have this process killed when the scheduler, its parent, is gone: the next one begins another."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _words_of_standby(engine: str) -> list[str]:
    """Return the words of the command that this process is to run, once it is needed. Empty: it is not.

    What that takes is imported before.
    """
    _end_with_parent()
    importlib.import_module(f".{engine}_engine", __package__)
    said = sys.stdin.buffer.read()
    return [] if not said else msgspec.json.decode(said, type=list[str])[-3:]


def main(words: Sequence[str]) -> None:
    """Run the command in ``words``."""
    if len(words) > 2:
        _end_with_parent()
        source = Path(words[2]).read_bytes()
        Path(words[2]).unlink()  # keys are in it
    else:
        source = sys.stdin.buffer.read()
    wanted = msgspec.json.decode(source, type=Wanted)
    with _answers_alone() as answers, engine_for(wanted) as engine:
        match words:
            case ["find"]:
                answer = engine.find()
            case ["begin"]:
                answer = engine.begin()
            case ["end"]:
                answer = engine.end()
            case ["bring", job, _]:
                engine.bring(job, partial(tell_progress, answers.fileno()))
                return
            case _:
                raise UsageError(f"{words} is not possible", "find, begin, end or bring JOB FILE")
        answers.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    words = sys.argv[1:]
    try:
        if words[:1] == ["standby"] and not (words := _words_of_standby(words[1])):
            sys.exit()
        main(words)
    except GpusliceError as error:
        if sys.argv[1:2] == ["bring"]:
            _forget_messages()
        sys.stderr.write(f"{error.message}\n{error.remedy}\n")
        if words[:1] == ["bring"] and error.exit_code == UNREACHABLE:
            time.sleep(_UNREACHABLE_S)
        sys.exit(error.exit_code)
