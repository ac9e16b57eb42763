"""Nodes of the host's memory, as a machine with two of them would list them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuslice.kernels.host import numa
from gpuslice.kernels.host.numa import near, node_of_gpu


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The processors of two nodes; those of this machine are divided between them."""
    processors = sorted(os.sched_getaffinity(0))
    nodes = [set(processors[::2]), set(processors[1::2])]
    for number, found in enumerate(nodes):
        directory = tmp_path / f"sys/devices/system/node/node{number}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(",".join(map(str, sorted(found))) + "\n")
    monkeypatch.setattr(numa, "_SYSTEM", tmp_path / "sys")
    monkeypatch.setattr(numa, "_DRIVER", tmp_path / "gpus")
    return nodes


def add_gpu(directory: Path, address: str, uuid: str, node: int) -> None:
    (directory / "gpus" / address).mkdir(parents=True)
    (directory / "gpus" / address / "information").write_text(f"Model: \t some\nGPU UUID: \t GPU-{uuid}\n")
    (directory / "sys/bus/pci/devices" / address).mkdir(parents=True)
    (directory / "sys/bus/pci/devices" / address / "numa_node").write_text(f"{node}\n")


@pytest.mark.usefixtures("two_nodes")
def test_a_gpu_s_node_is_that_of_its_address(tmp_path: Path) -> None:
    add_gpu(tmp_path, "0000:3b:00.0", "aa-1", 0)
    add_gpu(tmp_path, "0000:d8:00.0", "bb-2", 1)
    add_gpu(tmp_path, "0000:d9:00.0", "cc-3", -1)
    assert [node_of_gpu(uuid) for uuid in ("aa-1", "bb-2", "cc-3", "dd-4")] == [0, 1, None, None]


def test_without_the_driver_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_DRIVER", tmp_path / "missing")
    assert node_of_gpu("aa-1") is None


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor cannot be two nodes")
def test_the_thread_runs_there_meanwhile(two_nodes: list[set[int]]) -> None:
    before = os.sched_getaffinity(0)
    for number, processors in enumerate(two_nodes):
        with near(number):
            assert os.sched_getaffinity(0) == processors
        with pytest.raises(OSError), near(number):
            os.stat("/nowhere")
        assert os.sched_getaffinity(0) == before


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("node", [None, 7])
def test_a_node_that_is_not_known_changes_nothing(node: int | None) -> None:
    before = os.sched_getaffinity(0)
    with near(node):
        assert os.sched_getaffinity(0) == before


def test_a_thread_that_may_not_run_there_stays(two_nodes: list[set[int]]) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, two_nodes[0])
    try:
        with near(1):
            assert os.sched_getaffinity(0) == two_nodes[0]
    finally:
        os.sched_setaffinity(0, before)


def test_ranges_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "devices/system/node/node0"
    directory.mkdir(parents=True)
    (directory / "cpulist").write_text("0-3,8,10-11\n")
    monkeypatch.setattr(numa, "_SYSTEM", tmp_path)
    assert numa._processors(0) == {0, 1, 2, 3, 8, 10, 11}
