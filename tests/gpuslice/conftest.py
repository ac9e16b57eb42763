"""Running real scripts, plainly and under ``gpuslice run``, each with a deadline."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

#: Far more than anything here takes; a hang must fail, not block.
DEADLINE_S = 120
Finished = subprocess.CompletedProcess[str]


class Workshop:
    """A directory for scripts, a RAM disk of its own, and two ways to run things."""

    def __init__(self, directory: Path, ramdisk: Path) -> None:
        self.directory = directory
        self.ramdisk = ramdisk
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("GPUSLICE_")}
        self.environ |= {"XDG_CONFIG_HOME": str(directory), "OMP_NUM_THREADS": "1"}

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
        return subprocess.run(
            command,
            input=stdin,
            cwd=self.directory,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path, tmp_path / "ramdisk")


@pytest.fixture
def others_lines() -> Callable[[str], str]:
    """Strips gpuslice's own lines from a stderr."""

    def strip(text: str) -> str:
        return "".join(line for line in text.splitlines(True) if not line.startswith("gpuslice: "))

    return strip
