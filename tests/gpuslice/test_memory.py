"""How much memory there is: the machine's, or less if a control group says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice import memory
from gpuslice.errors import EnvironmentUnusableError


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1 GiB available and no control group."""
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 4194304 kB\nMemAvailable: 1048576 kB\n")
    return tmp_path


def test_without_a_control_group_it_is_the_machine_s(machine: Path) -> None:
    assert memory.available_bytes() == 1 << 30


@pytest.mark.parametrize(("limit", "available"), [("max", 1 << 30), ("1000", 700), (str(1 << 40), 1 << 30)])
def test_a_control_group_may_allow_less(machine: Path, limit: str, available: int) -> None:
    (machine / "memory.max").write_text(limit + "\n")
    (machine / "memory.current").write_text("600\n")
    (machine / "memory.stat").write_text("active_file 100\ninactive_file 200\nanon 300\n")
    assert memory.available_bytes() == available


def test_a_kernel_that_does_not_say_is_refused(machine: Path) -> None:
    (machine / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(EnvironmentUnusableError, match="MemAvailable"):
        memory.available_bytes()
