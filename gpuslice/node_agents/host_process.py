"""gpuslice's end of ssh on another machine: ``python -m gpuslice.node_agents.host_process find|begin|end``.

It reads a ``Request`` from stdin, and answers on stdout with one line. Keys come this way only: they are on
no command line, and in no file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path

import msgspec

from gpuslice import config
from gpuslice.errors import EnvironmentUnusableError, GpusliceError
from gpuslice.files import private_directory, replace_file
from gpuslice.nodes.plan import Config
from gpuslice.sched_core.nodes.endpoint import LOCK, check_path, host_and_port
from gpuslice.sched_core.nodes.local_node import rank_endpoint
from gpuslice.types import Label, PathText, Word

from . import preflight
from .agent_process import LOG
from .keeper import running
from .reach import first_reachable, unreachable
from .ssh import ANSWER

#: In the agent's directory: who keeps it, and a fingerprint of what it was told.
_KEEPER, _TOLD = "keeper.pid", "told"
_START_S, _LEAVE_S = 60.0, 10.0
_LOOK_AGAIN_S = 0.05
#: Variables by which ssh says who connected to where.
_CONNECTION = "SSH_CONNECTION"


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the scheduler's machine asks.

    Attributes
    ----------
    name
        Of the node.
    scheduler
        Tells schedulers apart: a fingerprint of machine, user and directory.
    devices, working_directory
        As for ``preflight.look``.
    agent
        What the agent is told; its endpoint is chosen here.
    endpoints
        Where the scheduler listens, by the addresses of its machine.
    machine
        Tells its machine from others.
    """

    name: Label
    scheduler: Word
    devices: tuple[Word, ...] = ()
    working_directory: PathText = ""
    agent: Config | None = None
    endpoints: tuple[Word, ...] = ()
    machine: Word = ""


class Told(msgspec.Struct, frozen=True):
    """The answer.

    Attributes
    ----------
    facts
        What this node has; only for ``find``.
    directory
        Of the agent.
    address
        Where others reach this node; empty: not known.
    error, remedy
        Why there is no agent.
    """

    directory: PathText = ""
    address: Word = ""
    facts: preflight.Facts | None = None
    error: Word = ""
    remedy: Word = ""


def main(word: str) -> None:
    """Answer one request."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    # Other output of libraries must not be taken for the answer.
    answer, sys.stdout = sys.stdout, sys.stderr
    directory = agent_directory(request)
    client, own = _addresses()
    told = Told(directory=str(directory), address=own)
    try:
        check_path(rank_endpoint(directory))
        if word == "begin":
            begin(directory, request, client)
        elif word == "end":
            end(directory)
        else:
            facts = preflight.look(request.devices, request.working_directory)
            told = msgspec.structs.replace(told, facts=facts)
    except GpusliceError as error:
        told = msgspec.structs.replace(told, error=error.message, remedy=error.remedy)
    answer.buffer.write(ANSWER + msgspec.json.encode(told) + b"\n")
    answer.flush()


def agent_directory(request: Request) -> Path:
    """Return the directory of the agent of that node and scheduler, also if nodes share a home."""
    environ = {name: value for name, value in os.environ.items() if name != "GPUSLICE_STATE_DIR"}
    return config.state_directory(environ=environ) / "agents" / f"{request.name}-{request.scheduler}"


def _addresses() -> tuple[str, str]:
    """Return the addresses of the machine that has logged in here, and of this one; empty if not known."""
    words = os.environ.get(_CONNECTION, "").split()
    return (words[0], words[2]) if len(words) == 4 else ("", "")


def begin(directory: Path, request: Request, client: str) -> None:
    """Start an agent that outlives this process, and what restarts it. Return when it runs.

    Raises
    ------
    EnvironmentUnusableError
        If it does not start, or the scheduler cannot be reached from here.
    """
    assert request.agent is not None
    endpoint, why = first_reachable(_candidates(request, client))
    if not endpoint:
        raise unreachable(why)
    told = msgspec.json.encode(msgspec.structs.replace(request.agent, endpoint=endpoint))
    known = blake2b(told, digest_size=16).hexdigest()
    private_directory(directory, option="--state-dir", parents=True)
    if running(directory) and running(directory, _KEEPER) and _read(directory / _TOLD) == known:
        return
    end(directory)
    replace_file(directory / _TOLD, known.encode())
    with (directory / LOG).open("ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "gpuslice.node_agents.keeper_process", str(directory)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    replace_file(directory / _KEEPER, str(keeper.pid).encode())
    assert keeper.stdin is not None
    with keeper.stdin as pipe:
        pipe.write(told)
    ends_s = time.monotonic() + _START_S
    while not running(directory):
        if keeper.poll() is not None or time.monotonic() > ends_s:
            raise EnvironmentUnusableError("its agent does not start", f"{directory / LOG} there says why")
        time.sleep(_LOOK_AGAIN_S)


def this_machine() -> str:
    """Return what tells this machine from others: the kernel's id, of this boot."""
    return _read(Path("/proc/sys/kernel/random/boot_id")).strip()


def _candidates(request: Request, client: str) -> list[str]:
    """Return where the scheduler may be reached from here, first as ssh has come from there."""
    ports = dict.fromkeys(host_and_port(one)[1] for one in request.endpoints)
    seen = [f"tcp://{_bracketed(client)}:{port}" for port in ports] if client else []
    ours = request.machine == this_machine()  # else its name for itself is this machine's, too
    others = [one for one in request.endpoints if ours or not host_and_port(one)[0].startswith("127.")]
    if len(request.endpoints) == 1:
        return others or list(request.endpoints)  # its user has named it
    return list(dict.fromkeys([*seen, *others]))


def end(directory: Path) -> None:
    """End the agent and what restarts it, and wait until both are gone. Jobs run on.

    Raises
    ------
    EnvironmentUnusableError
        If one of them does not end.
    """
    ends_s = time.monotonic() + _LEAVE_S
    for file in (_KEEPER, LOCK):
        if pid := running(directory, file):
            os.kill(pid, signal.SIGTERM)
        while running(directory, file):
            if time.monotonic() > ends_s:
                raise EnvironmentUnusableError(
                    f"the agent in {directory} does not end", f"end its process {pid} there"
                )
            time.sleep(_LOOK_AGAIN_S)
    for name in (_KEEPER, _TOLD):
        (directory / name).unlink(missing_ok=True)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


if __name__ == "__main__":
    main(sys.argv[1])
