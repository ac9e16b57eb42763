"""Driver facts through the real pynvml, over a fake NVML in C."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpuslice.kernels.nvml import Driver, Gpu, visible

from ..fakes.build import build, python

PRINT = """
import msgspec
from gpuslice.kernels.nvml import read_driver
print(msgspec.json.encode(read_driver()).decode())
"""


def read(libraries: Path, **environ: str) -> Driver:
    done = python(PRINT, libraries, **environ)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=Driver)


def gpu(index: int, **changes: object) -> Gpu:
    values: dict[str, object] = {
        "index": index,
        "name": f"Fake GPU {index}",
        "uuid": f"GPU-00000000-0000-0000-0000-{index:012}",
        "capability": "9.0",
        "total_bytes": 80 * 10**9,
        "used_bytes": 10**9,
    }
    return Gpu(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_gpus_and_versions(nvml_library: Path, count: int) -> None:
    found = read(nvml_library, FAKE_NVML_GPUS=str(count))
    assert found == Driver("580.65.06", "13.0", tuple(gpu(index) for index in range(count)))
    assert found.major == 580


def test_an_old_driver_leaves_gaps(tmp_path: Path) -> None:
    build(tmp_path, "libnvidia-ml.c", "libnvidia-ml.so.1", "-DOLD_DRIVER")
    found = read(tmp_path, FAKE_NVML_DRIVER="450.80.02")
    assert found == Driver("450.80.02", None, (gpu(0, capability=None),))
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


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2, 0", [2, 0]),
        ("0,7,1", [0]),
        ("GPU-00000000-0000-0000-0000-000000000001", [1]),
        ("GPU-0", []),
        ("-1", []),
    ],
)
def test_visible_devices(value: str | None, indices: list[int]) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [found.index for found in visible([gpu(0), gpu(1), gpu(2)], environ)] == indices
