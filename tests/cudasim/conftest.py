"""Tests over the simulated CUDA runtime: `./x test-cuda` runs them in an environment where torch finds it.

With ``CUDASIM_ON_A_GPU=1`` those that need no simulation run on a real GPU, as tests marked ``gpu``.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..gpuslice.conftest import Workshop, servers
from ..gpuslice.warm.process import Servers
from .tally import markdown, tables

__all__ = ["servers"]

#: Set by `./x test-cuda`; without the simulation or a GPU nothing here can run, and nothing is collected.
LIBRARIES = os.environ.get("CUDASIM_LIBRARIES", "")
ON_A_GPU = not LIBRARIES and os.environ.get("CUDASIM_ON_A_GPU") == "1"
collect_ignore_glob = [] if LIBRARIES or ON_A_GPU else ["test_*.py"]
if ON_A_GPU:
    # Their modules begin with what the simulation is asked for.
    collect_ignore_glob = [
        f"test_{name}.py"
        for name in ("budgets", "faults", "gpu_suite", "nccl", "operators", "runtime", "waits")
    ]
    instead = str(Path(__file__).with_name("on_a_gpu"))
    sys.path.insert(0, instead)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [instead, os.environ.get("PYTHONPATH")]))

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU: what needs the simulation, or more GPUs than there are, is skipped."""
    if not ON_A_GPU:
        return
    import torch

    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("gpu")
            if item.get_closest_marker("simulated"):
                item.add_marker(pytest.mark.skip(reason="orders or counts what only the simulation can"))
            if item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
                item.add_marker(pytest.mark.skip(reason="there is one GPU"))


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
