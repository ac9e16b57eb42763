"""One try of a delivery: the command is run, or the message is sent. Both wait, and belong into a thread."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib import request
from urllib.error import HTTPError, URLError

from gpuslice.version import __version__

#: The longest that a command may run, and that each step of sending a message may take.
COMMAND_LIMIT_S = 60.0
MESSAGE_LIMIT_S = 10.0
#: How long a command has to end after SIGTERM.
_GRACE_S = 3.0
_LOOK_AGAIN_S = 0.05
#: The command is handed over in a variable: everybody on the machine can read the arguments of processes.
_COMMAND = "GPUSLICE_ON_END"
_SHELL = ("/bin/sh", "-c", f'eval "${_COMMAND}"')


def run(
    command: str, environ: Mapping[str, str], directory: str, output: Path, limit_s: float = COMMAND_LIMIT_S
) -> str:
    """Run ``command`` by the shell and wait for its end. Return why it failed, or an empty text.

    What it prints is appended to ``output``. The file is locked as long as the command has it open. So a
    command that an earlier scheduler has started is not run beside its second try.
    """
    try:
        with output.open("ab") as file:
            _lock(file, limit_s)
            process = subprocess.Popen(
                _SHELL,
                cwd=directory,
                env={**environ, _COMMAND: command},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            return _wait(process, limit_s)
    except (OSError, ValueError) as error:
        return f"it cannot be started: {_said(error)}"


def _lock(file: IO[bytes], limit_s: float) -> None:
    """Wait until no command has ``file`` open any more, but no longer than ``limit_s``."""
    ends_s = time.monotonic() + limit_s
    while time.monotonic() < ends_s:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOOK_AGAIN_S)


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return f"it was ended after {limit_s:g} s"
    return f"exit code {code}" if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End ``process`` and all others of its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)


class _NoRedirect(request.HTTPRedirectHandler):
    """A handler that follows no redirection: the message was to go to the stated URL."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def post(url: str, body: bytes, limit_s: float = MESSAGE_LIMIT_S) -> str:
    """Send ``body``, which is JSON, to ``url`` by POST. Return why that failed, or an empty text.

    The text does not have the URL, which may hold a secret.
    """
    headers = {"Content-Type": "application/json", "User-Agent": f"gpuslice/{__version__}"}
    try:
        with request.build_opener(_NoRedirect).open(
            request.Request(url, body, headers, method="POST"), timeout=limit_s
        ):
            return ""
    except HTTPError as error:
        error.close()
        return f"HTTP status {error.code}"
    except URLError as error:
        return _said(error.reason)
    except (OSError, HTTPException, ValueError) as error:
        return _said(error)


def _said(error: object) -> str:
    """Return an error in words. Other texts than those of the system may have the URL or the command."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return type(error).__name__
