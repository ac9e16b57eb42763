"""A scheduler of a benchmark's own, started as users do."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuslice.client.client import Client


@contextmanager
def scheduler(*options: str) -> Iterator[tuple[Client, Path]]:
    """``gpuslice up`` with ``options`` in a directory of its own, taken down at the end."""
    gpuslice = [sys.executable, "-m", "gpuslice"]
    with tempfile.TemporaryDirectory(prefix="gpuslice-bench-") as name:
        directory = Path(name) / "s"
        place = ["--state-dir", str(directory)]
        # The benchmark itself may be on the GPU.
        subprocess.run(
            [*gpuslice, "up", *options, "--foreign", "ignore", *place], check=True, stdout=subprocess.DEVNULL
        )
        try:
            with Client(directory) as client:
                yield client, directory
        finally:
            subprocess.run([*gpuslice, "down", *place], check=True)
