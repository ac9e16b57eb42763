"""A process that asks Ray or ssh (``gpuslice.node_agents.agents``), and what it says meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.nodes.plan import SAID, Answer, Wanted

_EXIT_USAGE = 2


def ask(
    word: str,
    wanted: Wanted,
    limit_s: float,
    say: Callable[[str], object],
    started: Callable[[subprocess.Popen[bytes]], object] = lambda process: None,
) -> Answer:
    """Return the answer of an engine that is asked ``word``, by a process of its own.

    Parameters
    ----------
    limit_s
        Longest wait for the answer.
    say
        Called with what the engine has to say meanwhile.
    started
        Called with the process, which may be killed: then it has failed.

    Raises
    ------
    EnvironmentUnusableError
        If it fails, or does not answer in time.
    UsageError
        If what is asked makes no sense.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuslice.node_agents.agents", word],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    started(process)
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(limit_s, end)
    timer.start()
    said: list[str] = []
    with process, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(process.stdout.read)
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(msgspec.json.encode(wanted))
        for line in process.stderr:
            text = line.decode(errors="replace").rstrip()
            if text.startswith(SAID):
                say(text.removeprefix(SAID))
            elif text:
                said.append(text)
    timer.cancel()
    if process.returncode == 0:
        return msgspec.json.decode(answer.result(), type=Answer)
    if late.is_set():
        raise _late(wanted, limit_s)
    lines = said[-2:] or ["it said nothing"]
    kind = UsageError if process.returncode == _EXIT_USAGE else EnvironmentUnusableError
    raise kind(lines[0], "".join(lines[1:]))


def _late(wanted: Wanted, limit_s: float) -> EnvironmentUnusableError:
    if wanted.hosts:
        return EnvironmentUnusableError(
            f"ssh has not answered within {limit_s:g} s", "see whether the machines answer"
        )
    return EnvironmentUnusableError(
        f"Ray has not answered within {limit_s:g} s",
        "see whether the head of the cluster runs: `ray status`",
    )
