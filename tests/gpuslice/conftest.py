"""Running real scripts, plainly and under ``gpuslice run``, each with a deadline."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ..conftest import QUICK
from ..patience import PATIENCE_S
from ..ports import unused_port
from .warm.process import Servers

Finished = subprocess.CompletedProcess[str]


class Workshop:
    """A directory for scripts, a RAM disk of its own, and two ways to run things.

    Without ``servers``, and if it is not to be ``quick``, Pythons are started as a user starts them.
    """

    def __init__(
        self, directory: Path, ramdisk: Path, servers: Servers | None = None, *, quick: bool = False
    ) -> None:
        self.directory = directory
        self.ramdisk = ramdisk
        self._begin: Callable[..., subprocess.Popen[str]] = servers.start if servers else subprocess.Popen
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("GPUSLICE_")}
        self.environ |= {"XDG_CONFIG_HOME": str(directory), "OMP_NUM_THREADS": "1"}
        if not servers and not quick:
            paths = self.environ.get("PYTHONPATH", "").split(os.pathsep)
            self.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != QUICK)

    def write(self, name: str, source: str) -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return path

    def command(self, *words: str) -> list[str]:
        """The command line of ``gpuslice run`` with a RAM disk of the test's own."""
        return [sys.executable, "-m", "gpuslice", "run", "--ramdisk-dir", str(self.ramdisk), *words]

    def gpuslice_run(self, *words: str) -> Finished:
        return self.execute(self.command(*words))

    def python(self, *words: str) -> Finished:
        return self.execute([sys.executable, *words])

    def execute(self, command: list[str], stdin: str | None = None) -> Finished:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if stdin is not None:
            pipes["stdin"] = subprocess.PIPE
        with self.start(command, **pipes) as process:
            try:
                out, err = process.communicate(stdin, timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return Finished(command, process.returncode, out, err)

    def start_ranks(self, ranks: int, command: list[str]) -> list[subprocess.Popen[str]]:
        """The ranks of a gang, as a launcher starts them; `finish_ranks` has what they print."""
        port = str(unused_port())
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return [
            self.start(command, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **pipes)
            for rank in range(ranks)
        ]

    def start(
        self, command: list[str], environ: Mapping[str, str] = MappingProxyType({}), **pipes: Any
    ) -> subprocess.Popen[str]:
        """A process in the directory that has the environment, and ``environ``."""
        environ = {**self.environ, **environ}
        return self._begin(command, cwd=self.directory, env=environ, text=True, **pipes)


def finish_ranks(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for ranks that must end well; what each printed."""
    printed = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, err
            printed.append(out)
        return printed
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


def train_undisturbed(directory: Path, servers: Servers, ranks: int, *words: str) -> str:
    """Run a script's ranks in warm processes and without a scheduler; return what they print."""
    workshop = Workshop(directory, directory / "ramdisk", servers)
    return "".join(finish_ranks(workshop.start_ranks(ranks, [sys.executable, *words])))


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path, tmp_path / "ramdisk")


@pytest.fixture
def quick_workshop(tmp_path: Path) -> Workshop:
    """A workshop whose Pythons begin like any other, and neither collect garbage often nor as they end."""
    return Workshop(tmp_path, tmp_path / "ramdisk", quick=True)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Fork Pythons that have torch."""
    with Servers.shared(tmp_path_factory.getbasetemp(), "torch") as found:
        yield found


@pytest.fixture
def warm_workshop(tmp_path: Path, servers: Servers) -> Workshop:
    """A workshop for tests in which it plays no part how a process begins; see warm/server.py."""
    return Workshop(tmp_path, tmp_path / "ramdisk", servers)


@pytest.fixture
def others_lines() -> Callable[[str], str]:
    """Strips gpuslice's own lines from a stderr."""

    def strip(text: str) -> str:
        return "".join(line for line in text.splitlines(True) if not line.startswith("gpuslice: "))

    return strip
