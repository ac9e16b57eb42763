"""``gpuslice doctor`` as a user runs it, on this machine and over fake NVIDIA libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuslice.cli import doctor
from gpuslice.config import Settings
from gpuslice.launch import diagnosis

from ..patience import PATIENCE_S

CUDA_BUILD = "__version__ = '2.11.0+cu130'\ncuda = '13.0'\n"
KEYS = {
    "ok",
    "gpuslice",
    "python",
    "devices",
    "driver",
    "torch",
    "cupy",
    "cuda_bindings",
    "compiler",
    "page_lock_limit_bytes",
    "shm",
    "memory",
    "huge_pages",
    "ramdisk",
    "measured",
}
DEVICE_KEYS = {
    "name",
    "model",
    "uuid",
    "capability",
    "slots",
    "total_bytes",
    "used_bytes",
    "routes",
    "check",
    "slower",
    "notes",
}


def run(*words: str, libraries: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GPUSLICE_")}
    if libraries is not None:
        variables["LD_LIBRARY_PATH"] = str(libraries)
    if "PYTHONPATH" in environ and "PYTHONPATH" in variables:
        environ["PYTHONPATH"] += os.pathsep + variables["PYTHONPATH"]
    return subprocess.run(
        [sys.executable, "-m", "gpuslice", "doctor", *words],
        env={**variables, **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def document(done: subprocess.CompletedProcess[str], code: int = 0) -> dict[str, Any]:
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == KEYS
    assert all(set(device) == DEVICE_KEYS for device in found["devices"])
    return dict(found)


@pytest.fixture
def fake_torch(tmp_path: Path) -> Path:
    """A directory for PYTHONPATH with a CUDA build of torch that cannot be imported."""
    package = tmp_path / "path" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('doctor imported torch')\n", encoding="utf-8")
    (package / "version.py").write_text(CUDA_BUILD, encoding="utf-8")
    return package.parent


def test_the_host(tmp_path: Path) -> None:
    absent = tmp_path / "none-yet"
    found = document(run("--json", GPUSLICE_RAMDISK_DIR=str(absent), GPUSLICE_CPU_SLOTS="3"))
    host = found["devices"][0]
    assert (host["name"], host["slots"], host["check"]) == ("cpu", 3, None)
    assert host["routes"]["tensor"] == {"available": True, "reason": "", "remedy": ""}
    assert not host["routes"]["vmm"]["available"]
    assert found["ramdisk"] == {"directory": str(absent), "state": "absent", "problem": ""}
    assert not absent.exists(), "looking must not make it"
    assert found["memory"]["total_bytes"] > found["memory"]["available_bytes"] > 0
    assert found["shm"]["path"] == "/dev/shm"


def test_gpus_without_importing_torch(nvml_library: Path, fake_torch: Path) -> None:
    environ = {"PYTHONPATH": str(fake_torch), "FAKE_NVML_GPUS": "2"}
    found = document(run("--json", libraries=nvml_library, **environ))
    assert [device["name"] for device in found["devices"]] == ["cpu", "cuda:0", "cuda:1"]
    assert found["driver"] == {"version": "580.65.06", "cuda": "13.0", "problem": ""}
    assert found["torch"] == {"version": "2.11.0+cu130", "cuda": "13.0"}
    gpu = found["devices"][1]
    assert (gpu["model"], gpu["capability"], gpu["total_bytes"]) == ("Fake GPU 0", "9.0", 80 * 10**9)
    assert gpu["routes"]["tensor"]["available"]
    assert gpu["routes"]["driver"]["available"]


def test_cuda_numbers_follow_what_is_visible(nvml_library: Path, fake_torch: Path) -> None:
    environ = {"PYTHONPATH": str(fake_torch), "FAKE_NVML_GPUS": "2", "CUDA_VISIBLE_DEVICES": "1"}
    found = document(run("--json", libraries=nvml_library, **environ))
    assert [(d["name"], d["model"]) for d in found["devices"][1:]] == [("cuda:0", "Fake GPU 1")]


def test_a_gpu_that_jobs_cannot_share_is_told(nvml_library: Path, fake_torch: Path) -> None:
    environ = {"PYTHONPATH": str(fake_torch), "FAKE_NVML_COMPUTE_MODE": "3"}
    found = document(run("--json", libraries=nvml_library, **environ))
    assert "exclusive mode" in found["devices"][1]["notes"][0]
    assert "note:" in run(libraries=nvml_library, **environ).stdout


def test_a_mig_instance_is_the_device(nvml_library: Path, fake_torch: Path) -> None:
    environ = {"PYTHONPATH": str(fake_torch), "FAKE_NVML_GPUS": "2", "FAKE_NVML_MIG": "2"}
    environ["CUDA_VISIBLE_DEVICES"] = "MIG-00000000-0000-0000-0001-000000000001"
    found = document(run("--json", libraries=nvml_library, **environ))
    (gpu,) = found["devices"][1:]
    assert (gpu["name"], gpu["uuid"]) == ("cuda:0", environ["CUDA_VISIBLE_DEVICES"])
    assert "MIG instance of GPU 1" in gpu["notes"][0]


def test_a_gpu_that_torch_cannot_use(nvml_library: Path, fake_torch: Path) -> None:
    (fake_torch / "torch" / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda = None\n")
    found = document(run("--json", libraries=nvml_library, PYTHONPATH=str(fake_torch)))
    route = found["devices"][1]["routes"]["tensor"]
    assert "built without CUDA" in route["reason"]
    assert "CUDA build" in route["remedy"]


def test_a_broken_driver(nvml_library: Path) -> None:
    found = document(run("--json", libraries=nvml_library, FAKE_NVML_BROKEN="1"))
    assert found["driver"]["version"] is None
    assert "mismatch" in found["driver"]["problem"].lower()


def test_the_ramdisk_of_somebody_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    found = document(run("--json", GPUSLICE_RAMDISK_DIR=str(tmp_path)))
    assert found["ramdisk"]["state"] == "unusable"
    assert str(tmp_path) in found["ramdisk"]["problem"]


def test_for_people() -> None:
    done = run()
    assert done.returncode == 0
    assert "Jobs can be suspended here." in done.stdout
    assert "cpu: " in done.stdout
    assert "tensor:       works" in done.stdout


def test_check_tries_it_for_real() -> None:
    found = document(run("--json", "--check"))
    assert (found["devices"][0]["check"], found["devices"][0]["slower"]) == ("", [])


def test_why_copies_are_slower_than_they_could_be_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = diagnosis.SelfTest("", ("the arena is not page-locked: ulimit",))
    monkeypatch.setattr(diagnosis, "_self_test", lambda names: dict.fromkeys(names, outcome))
    found = diagnosis.diagnose(Settings(), {}, check=True)
    assert found.devices[0].works
    assert any("the arena is not page-locked: ulimit" in line for line in doctor._lines(found))


def test_a_torch_that_does_not_import_fails_the_check(fake_torch: Path) -> None:
    found = document(run("--json", "--check", PYTHONPATH=str(fake_torch)), code=3)
    assert not found["ok"]
    assert "AssertionError" in found["devices"][0]["check"]
    assert run("--check", PYTHONPATH=str(fake_torch)).stdout.endswith("see the reasons above.\n")


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuslice.kernels.routes.installed_torch", lambda: None)
    found = diagnosis.diagnose(Settings(), {})
    assert not found.ok
    lines = list(doctor._lines(found))
    assert any("torch is not installed; install torch" in line for line in lines)


@pytest.mark.parametrize(("limit_bytes", "shown"), [(1000, 1000), (1 << 61, None)])
def test_the_memory_limit_of_a_container(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int, shown: int | None
) -> None:
    monkeypatch.setattr(diagnosis, "cgroup_limit_bytes", lambda: limit_bytes)
    assert diagnosis._memory().cgroup_limit_bytes == shown
