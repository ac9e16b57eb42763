"""Measured rates in the user's cache: kept, shown with their age, and only of what they were measured on."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice.cli import doctor
from gpuslice.config import Settings
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.kernels.nvml import Driver, Gpu
from gpuslice.kernels.routes import Ground, TorchBuild
from gpuslice.launch import diagnosis, measured_rates
from gpuslice.launch.measured_rates import Measured, Outcome, Peer, Rates

UUIDS = {"cuda:0": "GPU-a", "cuda:1": "GPU-b"}
RATES = {name: Rates(25.0, 26.0, 0.4) for name in UUIDS}
OUTCOME = Outcome(RATES, [Peer("cuda:0", "cuda:1", True, 200.0)], [])


def gpus(*uuids: str) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, "GPU", uuid, "9.0", 10**10, 0) for index, uuid in enumerate(uuids))


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine with two GPUs, whose links a child process has measured."""
    driver = Driver("580.65.06", "13.0", gpus("GPU-a", "GPU-b"))
    monkeypatch.setattr(Ground, "here", lambda environ: Ground(TorchBuild("2.11.0", "13.0"), driver, environ))
    monkeypatch.setattr(measured_rates, "_in_child", lambda names: OUTCOME)
    return {"XDG_CACHE_HOME": str(tmp_path)}


def test_what_was_measured_is_shown_with_its_age_until_it_is_renewed(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    assert diagnosis.diagnose(Settings(), environ).measured.age_s is None
    assert diagnosis.diagnose(Settings(), environ, measure=True).measured.age_s == 0
    monkeypatch.setattr("time.time", lambda: 8200.0)
    found = diagnosis.diagnose(Settings(), environ)
    assert (found.measured.age_s, found.measured.rates) == (7200, RATES)
    lines = "\n".join(doctor._lines(found))
    assert "measured 2 h ago" in lines
    assert "out 25.0 GB/s, in 26.0 GB/s, page-locking 0.4 s/GB" in lines
    assert "cuda:0 to cuda:1: 200.0 GB/s, directly" in lines
    assert diagnosis.diagnose(Settings(), environ, measure=True).measured.age_s == 0


@pytest.mark.parametrize(
    ("driver", "uuids"), [("590.1", UUIDS), ("580.65.06", {"cuda:0": "GPU-b", "cuda:1": "GPU-a"})]
)
def test_other_gpus_or_another_driver_have_not_been_measured(
    environ: dict[str, str], driver: str, uuids: dict[str, str]
) -> None:
    kept = measured_rates.measure(driver, uuids, 0.0)
    measured_rates.save(kept, environ)
    found = diagnosis.diagnose(Settings(), environ).measured
    assert (found.age_s, found.rates) == (None, {})
    assert "not measured" in found.problems[0]


def test_a_damaged_file_is_named_and_replaced(environ: dict[str, str], tmp_path: Path) -> None:
    measured_rates.save(measured_rates.measure("1", UUIDS, 0.0), environ)
    (path,) = (tmp_path / "gpuslice").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(EnvironmentUnusableError, match=str(path)):
        measured_rates.load(environ)
    assert str(path) in diagnosis.diagnose(Settings(), environ).measured.problems[0]
    assert diagnosis.diagnose(Settings(), environ, measure=True).measured.problems == []
    assert isinstance(measured_rates.load(environ), Measured)


def test_a_child_that_fails_is_an_error_that_says_what_it_said(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no GPU >&2\nexit 7\n")
    python.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(EnvironmentUnusableError, match="ended with 7: no GPU"):
        measured_rates.measure("1", UUIDS, 0.0)
