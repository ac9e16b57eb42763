"""Tests over the simulated CUDA runtime: `./x test-cuda` runs them in an environment where torch finds it."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..gpuslice.conftest import Workshop, servers
from ..gpuslice.warm.process import Servers
from .tally import markdown, tables

__all__ = ["servers"]

#: Set by `./x test-cuda`; without the simulation none of this can run, and nothing here is collected.
LIBRARIES = os.environ.get("CUDASIM_LIBRARIES", "")
collect_ignore_glob = [] if LIBRARIES else ["test_*.py"]

if LIBRARIES:
    # Read at the first CUDA call. A file makes this process's memory one that its children see taken.
    _ACCOUNT = tempfile.TemporaryDirectory(prefix="cudasim-", ignore_cleanup_errors=True)
    os.environ |= {"CUDASIM_ACCOUNT": f"{_ACCOUNT.name}/account", "CUDASIM_DEVICES": "2"}
    # What all processes of the session add up to, its workers under xdist included.
    os.environ.setdefault("CUDASIM_TALLY", f"{_ACCOUNT.name}/tally")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The list of switches, routes and faults with counts, and the table of budgets."""
    path = Path(os.environ.get("CUDASIM_TALLY", ""))
    if path.is_file() and "PYTEST_XDIST_WORKER" not in os.environ:
        for title, table in tables(path.read_text(encoding="utf-8").splitlines()):
            if len(table) > 1:
                terminalreporter.write_line(f"\n{title}\n\n{markdown(table)}")


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    """What a test orders to fail and never happens must not happen to the next one, which begins on GPU 0."""
    yield
    import cudasim
    import torch

    cudasim.forget_faults()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.set_device(0)


@pytest.fixture
def script_environ(tmp_path: Path) -> dict[str, str]:
    """What a script of its own process is told, so that its GPUs are its own."""
    return {"CUDASIM_ACCOUNT": str(tmp_path / "account"), "CUDASIM_DELAY_US": "50"}


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    """Scripts in processes of their own, on GPUs of their own."""
    return on_gpus(Workshop(tmp_path, tmp_path / "ramdisk"))


@pytest.fixture
def warm_workshop(tmp_path: Path, servers: Servers) -> Workshop:
    """The same, in processes that have torch already; they are forked before CUDA is."""
    return on_gpus(Workshop(tmp_path, tmp_path / "ramdisk", servers))


def on_gpus(workshop: Workshop) -> Workshop:
    workshop.environ |= {
        "CUDASIM_ACCOUNT": str(workshop.directory / "account"),
        "CUDASIM_DELAY_US": "50",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "HOME": str(workshop.directory),
        "XDG_RUNTIME_DIR": str(workshop.directory),
    }
    return workshop
