"""A scheduler of its own for a test, reached by the command line as users do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import pytest

from gpuslice.client.client import Client
from gpuslice.verbs import SchedulerStatus

from ..gpuslice.warm.process import Servers
from ..patience import PATIENCE_S

RANK = Path(__file__).parents[1] / "sched_core" / "rank.py"


@dataclass
class Shell:
    """Runs ``gpuslice`` commands against one state directory."""

    directory: Path
    start: Callable[..., subprocess.Popen[str]] = subprocess.Popen
    clients: list[Client] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def __call__(self, *words: str, code: int = 0, deadline_s: float = PATIENCE_S) -> str:
        with self.start(
            [sys.executable, "-m", "gpuslice", *words],
            env={**os.environ, **self.variables, "GPUSLICE_STATE_DIR": str(self.directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=deadline_s)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == code, (words, process.returncode, out, err)
        return out if code == 0 else err

    def up(self, *words: str) -> None:
        self("up", "--devices", "null:1", "--quantum", "100ms", *words)

    def client(self) -> Client:
        self.clients.append(Client(self.directory))
        return self.clients[-1]

    def submit(
        self,
        boundaries: int | Path = 40,
        code: int = 0,
        *,
        name: str | None = None,
        ranks: int = 1,
        steps: int = 0,
    ) -> str:
        """A job that trains nothing, for so many boundaries or until there is such a file, see rank.py."""
        words = ["--", sys.executable, str(RANK), str(boundaries), str(code)]
        environ = {**os.environ, "WORLD": str(ranks)}
        return self.client().submit(words, name=name, devices=ranks, environ=environ, steps=steps)

    def status(self) -> SchedulerStatus:
        return msgspec.json.decode(self("ps", "--json"), type=SchedulerStatus)

    def processes_of(self, job: str, *, supervisors: bool = False) -> list[psutil.Process]:
        """The processes of ``job``: its command and ranks, or its supervisor."""
        found = []
        for process in psutil.process_iter():
            try:
                environ = process.environ()
                # Others on this machine may have a job of that name.
                ours = environ.get("GPUSLICE_JOB") == job
                ours = ours and str(self.directory) in environ.get("GPUSLICE_SOCKET", "")
                if ours and supervisors == any("supervisor.py" in word for word in process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue  # it has just ended, or is somebody else's
        return found

    def kill(self) -> None:
        """End the scheduler as nothing else would, and wait until it is gone."""
        scheduler = psutil.Process(self.pid)
        scheduler.kill()
        psutil.wait_procs([scheduler], timeout=PATIENCE_S)

    @property
    def pid(self) -> int:
        return int((self.directory / "scheduler.pid").read_text())


@contextmanager
def shell_in(directory: Path, commands: Servers | None = None) -> Iterator[Shell]:
    """A shell, and nothing left of what it started. ``commands`` spare it the imports of each command."""
    found = Shell(directory, commands.start if commands else subprocess.Popen)
    try:
        yield found
    finally:
        for client in found.clients:
            client.close()
        # A test that failed may have left processes; their variables or arguments name the directory.
        for process in psutil.process_iter(["environ", "cmdline"]):
            words = [*(process.info["environ"] or {}).values(), *(process.info["cmdline"] or [])]
            if any(str(directory) in word for word in words):
                with suppress(psutil.NoSuchProcess):  # it has ended since
                    process.kill()


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Fork Pythons that have gpuslice's command line."""
    with Servers.shared(tmp_path_factory.getbasetemp(), "gpuslice") as found:
        yield found


@pytest.fixture
def shell(tmp_path: Path, commands: Servers) -> Iterator[Shell]:
    with shell_in(tmp_path / "s", commands) as found:
        yield found
