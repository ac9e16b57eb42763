"""Driver facts through the real pynvml, over a fake NVML in C."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pynvml
import pytest

from gpuslice.kernels import nvml
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


#: What a question to NVML has been seen to raise.
RAISED = [
    pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST),
    pynvml.NVMLLibraryMismatchError("Unversioned function called and the pyNVML version does not match"),
    OSError("libnvidia-ml.so.1: cannot open shared object file"),
    AttributeError("module 'pynvml' has no attribute"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ValueError("NULL pointer access"),
]
ASKED = [
    "nvmlInit",
    "nvmlShutdown",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetComputeRunningProcesses",
]


def raising(error: Exception) -> Callable[..., object]:
    def ask(*_: object) -> object:
        raise error

    return ask


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML with one GPU, of which this process has 7 bytes."""
    given: dict[str, Callable[..., object]] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index + 1,
        "nvmlDeviceGetUUID": lambda handle: b"GPU-1",  # an old binding's
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            SimpleNamespace(pid=0, usedGpuMemory=None),
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=None),
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=(1 << 64) - 1),
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=7),
        ],
    }
    for name, answer in given.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr(nvml, "_handles", {})


@pytest.mark.usefixtures("answers")
def test_what_this_process_has_is_told_by_any_binding() -> None:
    assert nvml.own_bytes("GPU-1") == nvml.own_bytes("1") == 7
    assert nvml.own_bytes("GPU-2") is None
    assert nvml.bytes_of_process(os.getpid()) == {"GPU-1": 7}


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", ASKED)
def test_no_question_to_nvml_raises(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    monkeypatch.setattr(pynvml, name, raising(error))
    assert nvml.own_bytes("GPU-1") in (7, None)
    assert nvml.bytes_of_process(os.getpid()) in ({"GPU-1": 7}, {"GPU 0": 7}, {})
    assert isinstance(nvml.read_driver(), Driver)


@pytest.mark.usefixtures("answers")
def test_a_binding_without_the_question_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2")
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: b"450.80.02")
    found = nvml.read_driver()
    assert (found.version, found.cuda, found.problem) == ("450.80.02", None, "")
