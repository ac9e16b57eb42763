"""What is kept on a disk while no scheduler runs: what this scheduler's jobs have, nothing of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice.checkpoint.format import tree
from gpuslice.checkpoint.format.layout import Layout, StorageSpec
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.config import load
from gpuslice.daemon.kept.snapshots import KEPT, KeptSnapshots
from gpuslice.daemon.scheduler_setup import Setup
from gpuslice.errors import EnvironmentUnusableError, RamDiskFullError
from gpuslice.files import private_directory
from gpuslice.sched_core.nodes.local_node import SOCKET
from gpuslice.types import DeviceName

NBYTES = 1 << 20
CPU = (DeviceName("cpu", 0),)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSLICE_RAMDISK_DIR", str(tmp_path / "memory"))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    private_directory(tmp_path / "state", option="--state-dir", parents=True)
    return tmp_path / "state"


def disk_of(directory: Path, **more: str) -> RamDisk:
    return RamDisk.from_settings(load(socket=f"ipc://{directory / SOCKET}", **more))


def leave(disk: RamDisk, job: str, boundary: int = 5) -> None:
    with disk.open_store(job) as store, store.begin(Layout((StorageSpec(NBYTES),))) as writer:
        writer.view(0)[:] = bytes([boundary]) * NBYTES
        writer.publish(tree.encode(boundary), [], boundary=boundary, restartable=True)


def stores(place: Path) -> set[str]:
    return {path.name.partition("@")[0] for path in place.glob("*.gsnp")}


def test_own_snapshots_are_moved_and_others_stay(state: Path, tmp_path: Path) -> None:
    mine, other, nobodys = disk_of(state), disk_of(tmp_path / "other"), RamDisk.from_settings(load())
    for disk in (mine, other, nobodys):
        leave(disk, "a")
    kept = KeptSnapshots(state, Setup(CPU))
    assert not kept.environ.get("GPUSLICE_SPILL_DIR")
    kept.check()
    kept.store({"a": 1})
    assert stores(state / KEPT) == {"a"}
    assert (mine.restartable_bytes(), mine.boundaries("a")) == (0, set())
    assert other.boundaries("a") == nobodys.boundaries("a") == {5}
    assert kept.environ["GPUSLICE_SPILL_DIR"] == str(state / KEPT)
    again = KeptSnapshots(state, Setup(CPU))
    assert again.environ["GPUSLICE_SPILL_DIR"] == str(state / KEPT), "the next scheduler's jobs find it"
    found = disk_of(state, spill_dir=str(state / KEPT))
    with found.open_store("a") as store, store.restartable()[5] as snapshot:
        assert snapshot.view(0) == bytes([5]) * NBYTES


def test_the_spill_directory_is_used_if_there_is_one(state: Path, tmp_path: Path) -> None:
    leave(disk_of(state), "a")
    KeptSnapshots(state, Setup(CPU, spill_dir=str(tmp_path / "spill"))).store({"a": 1})
    assert stores(tmp_path / "spill") == {"a"}
    assert not (state / KEPT).exists()


def test_without_room_it_is_said_before_anything_is_moved(state: Path, tmp_path: Path) -> None:
    disk = disk_of(state)
    for job in "ab":
        leave(disk, job)
    kept = KeptSnapshots(state, Setup(CPU, spill_dir=str(tmp_path / "spill"), spill_limit="1M"))
    with pytest.raises(RamDiskFullError, match=r"has room for 976.56 KiB; the snapshots of the jobs have "):
        kept.check()
    assert not stores(tmp_path / "spill")
    assert disk.boundaries("a") == disk.boundaries("b") == {5}


def test_a_job_without_a_whole_snapshot_is_named_and_nothing_is_lost(state: Path) -> None:
    disk = disk_of(state)
    for job in "ab":
        leave(disk, job)
    slot = disk.home("b", 0) / "A.gsnp"
    content = bytearray(slot.read_bytes())
    content[len(content) // 2] ^= 1
    slot.write_bytes(content)
    kept = KeptSnapshots(state, Setup(CPU))
    with pytest.raises(EnvironmentUnusableError, match="rank 0 of job b is not whole"):
        kept.store({"a": 1, "b": 1})
    assert stores(state / KEPT) == {"a"}
    assert kept.environ["GPUSLICE_SPILL_DIR"] == str(state / KEPT), "a goes on from there"
    with pytest.raises(EnvironmentUnusableError, match="rank 0 of job c"):
        kept.store({"c": 1})


def test_jobs_without_state_need_no_room(state: Path) -> None:
    kept = KeptSnapshots(state, Setup((DeviceName("null", 0),)))
    kept.check()
    kept.store({"a": 1})
    assert not (state / KEPT).exists()
