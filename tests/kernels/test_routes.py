from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.kernels import routes
from gpuslice.kernels.nvml import Driver, Gpu
from gpuslice.kernels.routes import Ground, TorchBuild, choose, installed_torch, read_version_file, verdicts
from gpuslice.kernels.vmm import shim
from gpuslice.types import DeviceName, Route

CPU, CUDA = DeviceName.parse("cpu"), DeviceName.parse("cuda:0")
GPU = Gpu(0, "a GPU", "GPU-1", "9.0", 1, 0)
#: A machine on which nothing is missing.
COMPLETE = Ground(TorchBuild("2.13.0", "13.0"), Driver("580.65.06", "13.0", (GPU,)), {})


@pytest.fixture(autouse=True)
def _a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "find_compiler", lambda environ: ["cc"])


def reason(kind: str, route: Route, **changes: object) -> str:
    verdict = verdicts(kind, dataclasses.replace(COMPLETE, **changes))[route]  # type: ignore[arg-type]
    assert verdict.available == (not verdict.reason)
    assert bool(verdict.remedy) == bool(verdict.reason)
    return verdict.reason


def test_tensor_works_wherever_torch_does() -> None:
    assert reason("cpu", Route.TENSOR) == reason("cuda", Route.TENSOR) == ""
    assert "not installed" in reason("cpu", Route.TENSOR, torch=None)
    assert reason("cpu", Route.TENSOR, driver=Driver(problem="none")) == ""


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"torch": TorchBuild("2.13.0+cpu", None)}, "without CUDA"),
        ({"driver": Driver(problem="NVML: not found")}, "NVML: not found"),
        ({"driver": Driver("580", "13.0")}, "no GPU"),
    ],
)
def test_what_a_gpu_needs(changes: dict[str, object], word: str) -> None:
    assert word in reason("cuda", Route.TENSOR, **changes)
    assert word in reason("cuda", Route.VMM, **changes)


def test_vmm_needs_torchs_own_allocator_and_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    expandable = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert "expandable_segments" in reason("cuda", Route.VMM, environ=expandable)
    monkeypatch.setattr(routes, "find_compiler", lambda environ: None)
    assert "no C compiler" in reason("cuda", Route.VMM)
    monkeypatch.setattr(routes, "find_compiler", lambda environ: ["cc"])
    assert reason("cuda", Route.VMM) == ""


def test_driver_needs_a_new_driver() -> None:
    assert "older than 570" in reason("cuda", Route.DRIVER, driver=Driver("550.1", "12.4", (GPU,)))
    assert "no GPU" in reason("cuda", Route.DRIVER, driver=Driver("580.1", "13.0"))
    assert reason("cuda", Route.DRIVER) == ""


def test_no_job_takes_itself_off_by_the_driver() -> None:
    with pytest.raises(EnvironmentUnusableError, match="another process"):
        choose(Route.DRIVER, CUDA, COMPLETE)


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("wanted", [Route.AUTO, Route.TENSOR])
def test_auto_is_the_proven_route(wanted: Route, device: DeviceName) -> None:
    assert choose(wanted, device) is Route.TENSOR


@pytest.mark.parametrize(("wanted", "device"), [(Route.VMM, CPU), (Route.DRIVER, CPU), (Route.DRIVER, CUDA)])
def test_a_named_route_is_refused_never_replaced(wanted: Route, device: DeviceName) -> None:
    with pytest.raises(EnvironmentUnusableError) as caught:
        choose(wanted, device, COMPLETE)
    assert f"the route {wanted.value} cannot be taken on {device}" in caught.value.message
    assert caught.value.remedy
    assert caught.value.exit_code == 3


def test_vmm_is_taken_once_its_shim_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Path] = []
    monkeypatch.setattr(routes, "shared_library", compiled.append)
    assert choose(Route.VMM, CUDA, COMPLETE) is Route.VMM
    assert compiled == [shim.SOURCE]

    def fail(source: Path) -> None:
        raise EnvironmentUnusableError("cc failed")

    monkeypatch.setattr(routes, "shared_library", fail)
    with pytest.raises(EnvironmentUnusableError, match="cc failed"):
        choose(Route.VMM, CUDA, COMPLETE)


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n", TorchBuild("2.11.0+cu130", "13.0")),
        ("__version__ = '2.6.0'\ncuda = '12.4'\nhip = None\n", TorchBuild("2.6.0", "12.4")),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", TorchBuild("2.13.0+cpu", None)),
    ],
)
def test_torchs_version_file(tmp_path: Path, text: str, build: TorchBuild) -> None:
    path = tmp_path / "version.py"
    path.write_text(f"from typing import Optional\n__all__ = ['cuda']\n{text}", encoding="utf-8")
    assert read_version_file(path) == build


def test_the_installed_torch_is_the_one_that_is_imported() -> None:
    import torch

    found = installed_torch()
    assert found is not None
    assert found.version == torch.__version__
    assert found.cuda == torch.version.cuda
