"""The driver's checkpoint verbs, against a fake driver in C that keeps the real one's state machine."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpuslice.errors import UsageError
from gpuslice.kernels import compiler, driver

from ..fakes.build import build, python
from ..patience import PATIENCE_S

PREAMBLE = """
import ctypes, uuid
from gpuslice.errors import *
from gpuslice.kernels.driver import Process, ProcessState

PID = 4242

def refused(kind, call, word):
    try:
        call()
    except GpusliceError as error:
        assert type(error) is kind and word in str(error), repr(error)
    else:
        raise AssertionError("it was not refused")

"""
Scenario = Callable[..., None]


@pytest.fixture
def scenario(cuda_libraries: Path) -> Scenario:
    def run(code: str, libraries: Path = cuda_libraries, **environ: str) -> None:
        done = python(PREAMBLE + code, libraries, **environ)
        assert done.returncode == 0, done.stderr

    return run


def test_the_way_out_and_back(scenario: Scenario) -> None:
    scenario("""
process = Process(PID)
assert process.state is ProcessState.RUNNING
process.lock(timeout_ms=5000)
assert process.state is ProcessState.LOCKED
process.checkpoint()
assert process.state is ProcessState.CHECKPOINTED
process.restore()
process.unlock()
assert process.state is ProcessState.RUNNING
""")


def test_a_verb_in_the_wrong_state_is_refused_and_changes_nothing(scenario: Scenario) -> None:
    scenario("""
process = Process(PID)
for verb in (process.checkpoint, process.restore, process.unlock):
    refused(SuspendedStateError, verb, "not in the state for it")
assert process.state is ProcessState.RUNNING
""")


def test_a_move_names_both_gpus(scenario: Scenario) -> None:
    scenario("""
process = Process(PID)
process.lock(); process.checkpoint()
old, new = uuid.uuid4(), uuid.uuid4()
process.restore({old: new})
seen = ctypes.create_string_buffer(32)
assert ctypes.CDLL("libcuda.so.1").fake_last_pairs(seen) == 1
assert seen.raw == old.bytes + new.bytes
""")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("", "refused(NoCudaError, lambda: Process(1).state, 'no such process')"),
        ("", "refused(SuspendRefusedError, lambda: Process(PID).lock(timeout_ms=1), 'still busy')"),
        ("cuInit:1:100", "refused(EnvironmentUnusableError, lambda: Process(PID), 'there is no GPU')"),
        (
            "cuCheckpointProcessLock:1:801",
            "refused(SuspendRefusedError, Process(PID).lock, 'cannot checkpoint')",
        ),
        ("cuCheckpointProcessLock:1:777", "refused(EnvironmentUnusableError, Process(PID).lock, '777')"),
    ],
)
def test_codes_are_explained(scenario: Scenario, script: str, code: str) -> None:
    scenario(code, FAKE_CUDA_FAIL=script)


def test_out_of_memory_at_the_restore_is_its_own_error(scenario: Scenario) -> None:
    scenario(
        """
process = Process(PID)
process.lock(); process.checkpoint()
refused(DeviceMemoryError, process.restore, "lacks memory")
process.restore(); process.unlock()
""",
        FAKE_CUDA_FAIL="cuCheckpointProcessRestore:1:2",
    )


def test_an_old_driver_is_named(scenario: Scenario, tmp_path: Path) -> None:
    build(tmp_path, "libcuda.c", "libcuda.so.1", "-DFAKE_OLD_DRIVER", "-Wno-unused-function")
    scenario("refused(EnvironmentUnusableError, Process(PID).lock, 'update it to 570')", libraries=tmp_path)


def test_no_driver_is_named(scenario: Scenario, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"not a library")
    scenario(
        "refused(EnvironmentUnusableError, lambda: Process(PID), 'no NVIDIA driver')", libraries=tmp_path
    )


def test_never_on_itself() -> None:
    with pytest.raises(UsageError, match="itself"):
        driver.Process(os.getpid())


@pytest.mark.parametrize(
    ("major", "reason"), [(0, "no NVIDIA driver"), (569, "older than 570"), (570, ""), (580, "")]
)
def test_which_drivers_can(major: int, reason: str) -> None:
    found = driver.unavailable(major)
    assert reason in found
    assert bool(found) == bool(reason)


def test_structures_are_those_of_cuda_h(tmp_path: Path) -> None:
    header = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include" / "cuda.h"
    words = compiler.find_compiler()
    if not header.is_file() or "CUcheckpointGpuPair" not in header.read_text() or words is None:
        pytest.skip("no cuda.h of CUDA 13, or no C compiler, to compare the structures with")
    sizes = {
        "sizeof(CUcheckpointLockArgs)": ctypes.sizeof(driver.LockArgs),
        "sizeof(CUcheckpointGpuPair)": ctypes.sizeof(driver.GpuPair),
        "sizeof(CUcheckpointRestoreArgs)": ctypes.sizeof(driver.RestoreArgs),
        "offsetof(CUcheckpointRestoreArgs, gpuPairsCount)": driver.RestoreArgs.count.offset,
        "offsetof(CUcheckpointRestoreArgs, reserved1)": driver.RestoreArgs.reserved1.offset,
        "CU_PROCESS_STATE_FAILED": driver.ProcessState.FAILED,
        "CUDA_ERROR_ILLEGAL_STATE": 401,
        "CUDA_ERROR_NOT_READY": 600,
        "CUDA_ERROR_NOT_SUPPORTED": 801,
    }
    source = tmp_path / "compare.c"
    checks = "".join(f'_Static_assert({what} == {int(size)}, "{what}");\n' for what, size in sizes.items())
    source.write_text(f"#include <stddef.h>\n#include <cuda.h>\n{checks}", encoding="utf-8")
    command = [*words, "-std=gnu11", "-fsyntax-only", f"-I{header.parent}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_another_process_leaves_its_gpu_and_comes_back() -> None:
    """On a real GPU: memory is free while the process is away, and its tensor is the same afterwards."""
    code = """
import torch
tensor = torch.arange(1 << 26, device="cuda")
print(tensor.sum().item(), flush=True)
input()
print(tensor.sum().item(), flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        before = job.stdout.readline()
        process = driver.Process(job.pid)
        free_before, _ = torch.cuda.mem_get_info()
        process.lock(timeout_ms=10_000)
        process.checkpoint()
        assert torch.cuda.mem_get_info()[0] - free_before >= 8 << 26
        process.restore()
        process.unlock()
        after, _ = job.communicate("go on\n", timeout=PATIENCE_S)
    assert after == before
