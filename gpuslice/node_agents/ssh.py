"""Programs on other machines by the user's own ``ssh``: its keys, its configuration, and never a prompt.

``GPUSLICE_SSH`` names another command in its place, as ``GIT_SSH_COMMAND`` does for git.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from typing import NamedTuple

from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.nodes.plan import Host
from gpuslice.version import __version__

COMMAND = "GPUSLICE_SSH"
#: No prompt, and an end within ten seconds if the machine does not answer, or does not answer any more.
_OPTIONS = (
    *("-T", "-x", "-a"),
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "ConnectionAttempts=1"),
    *("-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3", "-o", "ClearAllForwardings=yes"),
    *("-o", "ControlMaster=no", "-o", "LogLevel=ERROR"),
)
#: Longest run of a program there: a Python that comes from a slow file system takes its time.
_PROGRAM_S = 60.0
#: Exit codes of ssh itself if it fails, and of a shell that has no such command.
_SSH_FAILED, _NO_COMMAND = 255, (126, 127)
#: What a line of the answer begins with; the machine's login may print lines, too.
ANSWER = b"gpuslice-answer "
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_PYTHON = re.compile(r"~?[A-Za-z0-9_./+-]+")


class Reply(NamedTuple):
    """What a program there has answered, and when that was heard by this machine's clock."""

    data: bytes
    heard_s: float


def parse_host(text: str) -> Host:
    """Return the host of ``--node NAME=[USER@]HOST[:PYTHON]``.

    Raises
    ------
    UsageError
        If it is none.
    """
    name, sign, rest = text.partition("=")
    address, _, python = rest.partition(":")
    if not sign or _NAME.fullmatch(name) is None or name in ("here", "cpu", "cuda", "null"):
        raise UsageError(f"--node {text} names no node", "write for instance --node b=ann@10.0.0.6")
    if not address or address.startswith("-") or any(sign.isspace() for sign in address):
        raise UsageError(f"--node {text} names no machine", "write for instance --node b=ann@10.0.0.6")
    if python.isdecimal():
        remedy = f"write it into ~/.ssh/config: `Host {name}`, `HostName {address}`, `Port {python}`"
        raise UsageError(f"--node {text}: what follows the colon is a Python, not a port", remedy)
    if python and _PYTHON.fullmatch(python) is None:
        raise UsageError(f"--node {text}: {python!r} is no path of a Python", "name one, or a link to it")
    return Host(name, address, python)


def run(host: Host, word: str, request: bytes) -> Reply:
    """Run ``gpuslice.node_agents.host_process`` on ``host``, and return its answer.

    What it is told goes to its stdin, so that nobody else sees it.

    Raises
    ------
    EnvironmentUnusableError
        If it could not be run, with the words of ssh or of the machine.
    """
    ssh = shlex.split(os.environ.get(COMMAND, "")) or ["ssh"]
    words = [*ssh, *_OPTIONS, "--", host.address, _command(host, word)]
    try:
        done = subprocess.run(words, input=request, capture_output=True, timeout=_PROGRAM_S, check=False)
    except OSError as error:
        raise EnvironmentUnusableError(
            f"{ssh[0]} cannot be started: {error.strerror}", f"install OpenSSH's client, or set {COMMAND}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentUnusableError(
            f"gpuslice there does not answer within {_PROGRAM_S:g} s", "see whether the machine is overloaded"
        ) from error
    heard_s = time.time()
    found = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if done.returncode == 0 and found:
        return Reply(found[-1].removeprefix(ANSWER), heard_s)
    raise _failure(host, done.returncode, done.stderr.decode(errors="replace").strip())


def _command(host: Host, word: str) -> str:
    """Return the line for the login shell there, whichever it is."""
    module = f"-m gpuslice.node_agents.host_process {word}"
    if host.python:
        return f"sh -c {shlex.quote(f'exec {host.python} {module}')}"
    ours = shlex.quote(sys.executable)
    return "sh -c " + shlex.quote(f'p={ours}; test -x "$p" || p=python3; exec "$p" {module}')


def _failure(host: Host, code: int, said: str) -> EnvironmentUnusableError:
    """Return the error for a program that did not answer, by its exit code and stderr."""
    last = said.splitlines()[-1] if said else f"exit code {code}"
    python = host.python or "its python3"
    other = f"--node {host.name}={host.address}:/path/to/python"
    if code == _SSH_FAILED:
        return EnvironmentUnusableError(
            f"ssh cannot log in to {host.address}: {last}",
            f"`ssh -o BatchMode=yes {host.address} true` must work without a question",
        )
    if code in _NO_COMMAND:
        return EnvironmentUnusableError(
            f"there is no Python {python} on {host.address}: {last}",
            f"name one that has gpuslice: {other}",
        )
    if "No module named" in said:
        return EnvironmentUnusableError(
            f"{python} on {host.address} has no gpuslice {__version__}: {last}",
            f"install it there, or name a Python that has it: {other}",
        )
    return EnvironmentUnusableError(f"gpuslice fails on {host.address}: {last}", "see what it says there")
