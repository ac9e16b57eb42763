"""Driver facts through the real pynvml, over a fake NVML in C."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpuslice.kernels.nvml import Driver, Gpu, cautions, visible

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
        "compute_mode": "default",
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


def mig(index: int, instance: int) -> Gpu:
    uuid = f"MIG-00000000-0000-0000-{index:04}-{instance:012}"
    return gpu(index, uuid=uuid, compute_mode=None)


def test_what_mig_divides(nvml_library: Path) -> None:
    """The second GPU of the fake has MIG on."""
    found = read(nvml_library, FAKE_NVML_GPUS="2", FAKE_NVML_MIG="2").gpus
    assert [one.instances and [i.uuid for i in one.instances] for one in found] == [
        (),
        [mig(1, 0).uuid, mig(1, 1).uuid],
    ]


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        (None, [gpu(0).uuid, mig(1, 0).uuid]),
        ("1", [mig(1, 0).uuid]),
        (str(mig(1, 1).uuid), [mig(1, 1).uuid]),
        (f"{mig(1, 1).uuid},{mig(1, 0).uuid}", [mig(1, 1).uuid]),
        ("MIG-00000000-0000-0000-0001", []),
        ("MIG-7", []),
    ],
)
def test_of_mig_instances_one_is_visible(value: str | None, uuids: list[str]) -> None:
    gpus = [gpu(0), gpu(1, instances=(mig(1, 0), mig(1, 1)))]
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [found.uuid for found in visible(gpus, environ)] == uuids
    assert len(cautions(gpus, environ)) == len(uuids)


def test_cautions() -> None:
    same = [gpu(0, name="A"), gpu(1, name="A", compute_mode="exclusive_process")]
    assert cautions(same, {})[0] == ()
    assert "nvidia-smi -i 1 -c 0" in cautions(same, {"CUDA_VISIBLE_DEVICES": "1"})[0][0]
    mixed = [gpu(0, name="A"), gpu(1, name="B")]
    assert all("CUDA_DEVICE_ORDER=PCI_BUS_ID" in own[0] for own in cautions(mixed, {}))
    assert cautions(mixed, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == [(), ()]
