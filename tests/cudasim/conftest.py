"""Tests over the simulated CUDA runtime: `./x test-cuda` runs them in an environment where torch finds it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Set by `./x test-cuda`; without the simulation none of this can run, and nothing here is collected.
LIBRARIES = os.environ.get("CUDASIM_LIBRARIES", "")
collect_ignore_glob = [] if LIBRARIES else ["test_*.py"]

if LIBRARIES:
    # Read at the first CUDA call. A file makes this process's memory one that its children see taken.
    _ACCOUNT = tempfile.NamedTemporaryFile(prefix="cudasim-")  # noqa: SIM115  (lives as long as the process)
    os.environ |= {"CUDASIM_ACCOUNT": _ACCOUNT.name, "CUDASIM_DEVICES": "2", "CUDASIM_MEMORY_MIB": "2048"}


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    """What a test orders to fail and never happens must not happen to the next one."""
    yield
    import cudasim

    cudasim.forget_faults()


@pytest.fixture
def script_environ(tmp_path: Path) -> dict[str, str]:
    """What a script of its own process needs, with GPUs of its own; `launch` looks for a driver's file."""
    preload = f"{LIBRARIES}/libcudasim_files.so"
    return {"LD_PRELOAD": preload, "CUDASIM_ACCOUNT": str(tmp_path / "account"), "CUDASIM_DELAY_US": "50"}
