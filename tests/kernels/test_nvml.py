"""Driver facts through the real pynvml, over a fake NVML in C."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpuslice.kernels.nvml import Driver

from ..fakes.build import build, python
from ..fakes.gpus import gpu, mig

PRINT = """
import msgspec
from gpuslice.kernels.nvml import read_driver
print(msgspec.json.encode(read_driver()).decode())
"""


def read(libraries: Path, **environ: str) -> Driver:
    done = python(PRINT, libraries, **environ)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=Driver)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_gpus_and_versions(nvml_library: Path, count: int) -> None:
    found = read(nvml_library, FAKE_NVML_GPUS=str(count))
    assert found == Driver("580.65.06", "13.0", tuple(gpu(index) for index in range(count)))
    assert found.major == 580


def test_an_old_driver_leaves_gaps(tmp_path: Path) -> None:
    build(tmp_path, "libnvidia-ml.c", "libnvidia-ml.so.1", "-DOLD_DRIVER")
    found = read(tmp_path, FAKE_NVML_DRIVER="450.80.02")
    assert found == Driver("450.80.02", None, (gpu(0, capability=None, compute_mode=None),))
    assert found.major == 450


def test_a_broken_driver_is_told(nvml_library: Path) -> None:
    found = read(nvml_library, FAKE_NVML_BROKEN="1")
    assert found.version is None
    assert found.gpus == ()
    assert "mismatch" in found.problem.lower()


def test_no_driver_is_told(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")
    found = read(tmp_path)
    assert found.problem
    assert found.major == 0


def test_what_mig_divides(nvml_library: Path) -> None:
    """The second GPU of the fake has MIG on."""
    found = read(nvml_library, FAKE_NVML_GPUS="2", FAKE_NVML_MIG="2").gpus
    assert [one.instances and [i.uuid for i in one.instances] for one in found] == [
        (),
        [mig(1, 0).uuid, mig(1, 1).uuid],
    ]
