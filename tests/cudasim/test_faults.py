"""Every CUDA call of a suspend, of a resume and of a move fails once: no byte of the state is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cudasim
import pytest

from gpuslice.errors import GpusliceError

from .faulted_job import CODES, DIRECTIONS, FALLIBLE, LAUNCH_FAILURE, OUT_OF_MEMORY, Job, opened

ROOT = Path(__file__).resolve().parents[2]
#: The shim comes before torch.
BY_VMM = """
from gpuslice.kernels.vmm.shim import preload
preload()
from tests.cudasim.faulted_job import main
main()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    yield from opened(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", FALLIBLE)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_call_that_fails_costs_no_byte(job: Job, direction: str, name: str, code: int) -> None:
    job.fail_everywhere(direction, name, code)


@pytest.mark.slow
def test_calls_of_the_vmm_route_that_fail_cost_no_byte(
    tmp_path: Path, script_environ: dict[str, str]
) -> None:
    environ = {**os.environ, **script_environ, "CUDASIM_DEVICES": "2", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", BY_VMM], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[-1][0] == "refused"
    assert int(lines[-1][1]) > 10
    assert {"cuMemCreate", "cuMemMap", "cuMemUnmap"} <= {name for _, name, *_ in lines[:-1]}


def test_what_fails_is_noticed(job: Job) -> None:
    """The matrix above would say nothing if faults went unnoticed."""
    job.refused.clear()
    cudasim.fail("cudaMemcpyAsync", LAUNCH_FAILURE)
    assert not job.suspend()
    assert job.suspend()
    cudasim.fail("cudaMemcpyAsync", LAUNCH_FAILURE)
    job.resume()
    assert job.suspend()
    cudasim.fail("cudaMemcpyAsync", LAUNCH_FAILURE)
    job.resume(move=True)
    assert len(job.refused) == 3


@pytest.mark.parametrize("move", [False, True], ids=["here", "elsewhere"])
def test_memory_that_is_short_leaves_nothing_taken(job: Job, move: bool) -> None:
    assert job.suspend()
    before = [cudasim.used_bytes(gpu) for gpu in (0, 1)]
    cudasim.fail("cudaMalloc", OUT_OF_MEMORY, nth=1)
    cudasim.fail("cudaMalloc", OUT_OF_MEMORY, nth=2)
    with pytest.raises(GpusliceError, match="bytes free"):
        job.resume_only(move=move)
    assert [cudasim.used_bytes(gpu) for gpu in (0, 1)] == before
    job.resume(move=move)
