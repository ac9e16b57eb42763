"""How much memory there is: the machine's, or less if a control group says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice import memory
from gpuslice.errors import EnvironmentUnusableError


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with 1 GiB available and no control group."""
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "self")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 4194304 kB\nMemAvailable: 1048576 kB\n")
    memory._groups.cache_clear()
    yield tmp_path
    memory._groups.cache_clear()


def test_without_a_control_group_it_is_the_machine_s(machine: Path) -> None:
    assert memory.available_bytes() == 1 << 30


def group(directory: Path, limit: str, *, version: int = 2) -> None:
    """A control group that uses 600 bytes, half of them for files that can be dropped."""
    total = "total_" if version == 1 else ""
    files = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        2: ("memory.max", "memory.current"),
    }[version]
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in zip(files, (limit, "600"), strict=True):
        (directory / name).write_text(text + "\n")
    (directory / "memory.stat").write_text(f"{total}active_file 100\n{total}inactive_file 200\nanon 300\n")


#: What version 1 says where there is no limit.
NONE_1 = str((1 << 63) - 4096)


@pytest.mark.parametrize(("limit", "available"), [("max", 1 << 30), ("1000", 700), (str(1 << 40), 1 << 30)])
def test_a_control_group_may_allow_less(machine: Path, limit: str, available: int) -> None:
    group(machine, limit)  # as a container sees it
    assert memory.available_bytes() == available


@pytest.mark.parametrize(("limit", "available"), [(NONE_1, 1 << 30), ("1000", 700)])
def test_a_control_group_of_version_1_may_allow_less(machine: Path, limit: str, available: int) -> None:
    (machine / "self").write_text("3:cpuset:/\n4:memory,hugetlb:/docker/1f\n0::/\n")
    group(machine / "memory", limit, version=1)  # a container's, where the path is the host's
    assert memory.available_bytes() == available
    assert memory.cgroup_limit_bytes() == min(int(limit), memory.UNLIMITED_BYTES)


@pytest.mark.parametrize(("inner", "outer", "available"), [("max", "1000", 700), ("900", "1000", 600)])
def test_the_process_s_own_control_group_and_those_above_it_count(
    machine: Path, inner: str, outer: str, available: int
) -> None:
    (machine / "self").write_text("0::/slurm/job_7/step_0\n")
    group(machine / "slurm" / "job_7" / "step_0", inner)
    group(machine / "slurm" / "job_7", outer)
    group(machine / "slurm" / "job_8", "610")
    assert memory.available_bytes() == available
    assert memory.cgroup_limit_bytes() == (1000 if inner == "max" else 900)


def test_a_kernel_that_does_not_say_is_refused(machine: Path) -> None:
    (machine / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(EnvironmentUnusableError, match="MemAvailable"):
        memory.available_bytes()


def test_a_machine_without_proc_is_refused(machine: Path) -> None:
    (machine / "meminfo").unlink()
    with pytest.raises(EnvironmentUnusableError, match="/proc"):
        memory.available_bytes()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.current", "max"),
        ("memory.current", None),
        ("memory.stat", "active_file\n"),
        ("memory.max", "\xff"),
    ],
)
def test_a_control_group_that_cannot_be_read_has_no_limit(machine: Path, name: str, text: str | None) -> None:
    group(machine, "1000")
    if text is None:
        (machine / name).unlink()
    else:
        (machine / name).write_text(text, encoding="latin-1")
    assert memory.available_bytes() == 1 << 30


def test_control_groups_named_in_an_unknown_form_are_passed_over(machine: Path) -> None:
    (machine / "self").write_text("what is this\n")
    assert memory.available_bytes() == 1 << 30
