"""Who shares a RAM disk: tenants with limits of their own, and schedulers whose jobs have the same names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.ramdisk.budget import Tenant
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.config import Settings
from gpuslice.errors import RamDiskFullError, UsageError

from .conftest import MIB, layout_of

Save = Callable[..., SnapshotFile]
Actor = Callable[..., Any]


def test_jobs_of_two_schedulers_may_have_one_name(shm: Path, save: Save) -> None:
    def of(directory: str) -> RamDisk:
        endpoint = f"ipc://{shm / directory / 'scheduler.sock'}" if directory else ""
        return RamDisk.from_settings(Settings(ramdisk_dir=str(shm / "disk"), socket=endpoint))

    (shm / "one").mkdir()
    (shm / "alias").symlink_to(shm / "one")
    with (
        of("one").open_store("a") as first,
        of("two").open_store("a") as second,
        of("").open_store("a") as own,
    ):
        for boundary, store in enumerate((first, second, own), start=1):
            save(store, boundary=boundary)
        with pytest.raises(UsageError, match="running already"):
            of("alias").open_store("a")
        listed = [(info.job, info.scheduler, info.boundary) for info in of("").listing()]
    assert sorted(listed) == [("a", "", 3), ("a", str(shm / "one"), 1), ("a", str(shm / "two"), 2)]
    # Each goes on from its own.
    for directory, boundary in [("two", 2), ("one", 1), ("", 3)]:
        assert of(directory).boundaries("a") == {boundary}
        with of(directory).open_store("a") as store:
            assert list(store.restartable()) == [boundary]


def of_tenant(disk: RamDisk, name: str, limit_bytes: int | None) -> RamDisk:
    """The same RAM disk, as a job of a tenant sees it."""
    return RamDisk(disk.directory, disk.limit_bytes, tenant=Tenant(name, limit_bytes))


def test_a_tenant_has_a_limit_beside_the_node_s(disk: RamDisk, save: Save) -> None:
    ours, theirs = of_tenant(disk, "vision", 20 * MIB), of_tenant(disk, "audio", None)
    with ours.open_store("a") as first, ours.open_store("b", 1) as second, theirs.open_store("c") as other:
        mine = save(first, boundary=1, sizes=(9 * MIB,))
        used = disk.used_bytes
        with pytest.raises(RamDiskFullError, match=r"^tenant vision has no .* 20\.00 MiB are used") as hit:
            second.begin(layout_of(8 * MIB))
        assert (hit.value.exit_code, disk.used_bytes) == (5, used)
        assert "--tenant-ramdisk vision=" in hit.value.remedy
        mine.verify()
        # What is left is theirs to the last byte, and others are not held back.
        save(second, boundary=1, sizes=(4 * MIB,)).verify()
        save(other, boundary=1, sizes=(30 * MIB,)).verify()
        assert second.warm_up(layout_of(4 * MIB)) is None
        with pytest.raises(RamDiskFullError, match=r"^the RAM disk"):
            other.begin(layout_of(300 * MIB))


def test_what_a_tenant_s_dead_jobs_left_counts(disk: RamDisk, save: Save) -> None:
    ours = of_tenant(disk, "vision", 16 * MIB)
    with ours.open_store("dead") as store:
        save(store, boundary=1, sizes=(9 * MIB,))
    with ours.open_store("living") as store:
        with pytest.raises(RamDiskFullError, match="tenant vision"):
            store.begin(layout_of(9 * MIB))
        assert [(info.tenant, info.limit_bytes) for info in disk.tenants()] == [("vision", 16 * MIB)]
        assert disk.tenants()[0].used_bytes == disk.used_bytes
        disk.collect(everything=True)
        save(store, boundary=1, sizes=(9 * MIB,)).verify()


def test_of_two_jobs_that_race_for_a_tenant_s_last_bytes_one_wins(disk: RamDisk, actor: Actor) -> None:
    racers = [actor(), actor()]
    for racer in racers:
        assert racer.ask("belong", tenant="vision", limit_bytes=40 * MIB)[0] == "ok"
    for round_ in range(5):
        for number, racer in enumerate(racers):
            assert racer.ask("open", job=f"{round_}-{number}")[0] == "ok"
        for racer in racers:
            racer.tell("begin", nbytes=25 * MIB)
        answers = [racer.answer() for racer in racers]
        assert sorted(answer[0] for answer in answers) == ["RamDiskFullError", "ok"]
        assert "tenant vision" in max(str(answer[1]) for answer in answers)
        for racer in racers:
            assert racer.ask("close", keep=False)[0] == "ok"
