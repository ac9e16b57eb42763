"""The room of parked jobs goes to whoever needs it; what lay there comes back as it was, or is refused."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from gpuslice.checkpoint.format.layout import Layout, StorageSpec
from gpuslice.checkpoint.ramdisk.budget import Tenant
from gpuslice.checkpoint.ramdisk.listing import Place
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.room_requests import SOCKET, request_room
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import CorruptSnapshotError, RamDiskFullError, SnapshotError

from ...conftest import MIB
from ...harness import FaultyDevice, Job, disturb
from .parked import NBYTES, Actor, Save, files, holds, mapped, spilled


def test_a_parked_job_makes_room_and_comes_back(
    disk: RamDisk, store: JobStore, place: Path, save: Save
) -> None:
    snapshot = save(store, boundary=3, restartable=False, sizes=(NBYTES, 100))
    used = disk.used_bytes
    with store.offering(snapshot):
        assert not files(place)
        assert request_room(store.directory)
        assert files(place) == ["a.r0.A.gsnp"]
        assert files(store.directory) == []
        assert mapped(disk) == 0
        assert disk.used_bytes < used - NBYTES
        assert not request_room(store.directory)
    assert not (store.directory / SOCKET).exists()
    assert not request_room(store.directory)
    store.bring_back(snapshot)
    assert holds(snapshot, 3, (NBYTES, 100))
    assert files(place) == []  # nobody else could go on from it
    assert [info.place for info in disk.listing()] == [None]
    assert save(store, boundary=4).generation == 2
    assert [info.place for info in disk.listing()] == [Place.RAM]


def test_the_room_is_free_whoever_else_has_the_slot_mapped(store: JobStore, save: Save) -> None:
    snapshot = save(store, boundary=1)
    inherited = memoryview(snapshot.arena)  # as forked children have it
    with (store.directory / "A.gsnp").open("rb") as file:
        assert os.fstat(file.fileno()).st_blocks * 512 > MIB
        with spilled(store, snapshot):
            assert os.fstat(file.fileno()).st_blocks == 0
    assert not any(inherited[:4096])
    store.bring_back(snapshot)
    assert holds(snapshot, 1)


def test_another_process_gets_the_room_without_asking_for_it(disk: RamDisk, actor: Actor, save: Save) -> None:
    parked = actor()
    parked.ask("open", job="parked")
    for boundary in (1, 2):
        parked.ask("save", boundary=boundary, nbytes=20 * MIB)
    with disk.open_store("mine") as store:
        with pytest.raises(RamDiskFullError, match="the RAM disk"):
            save(store, sizes=(25 * MIB,))
        assert parked.ask("park") == ("ok", None)
        # First what it needs least: the snapshot before the one that it comes back from.
        save(store, boundary=1, sizes=(25 * MIB,)).verify()
        (_, info) = disk.listing()
        assert (info.job, info.place, info.boundary) == ("parked", Place.RAM, 2)
        assert 20 * MIB < info.spilled_bytes < info.bytes
        with disk.open_store("yours") as other:
            save(other, boundary=2, sizes=(25 * MIB,)).verify()
            assert disk.listing()[1].place is Place.SPILLED
            assert disk.boundaries("parked") == {1, 2}
            other.close(keep=False)
        store.close(keep=False)
    assert parked.ask("come_back") == ("ok", [2, 2])
    assert disk.listing()[0].place is Place.SPILLED
    for boundary in (3, 4):
        assert parked.ask("save", boundary=boundary)[0] == "ok"
    assert (disk.listing()[0].place, disk.boundaries("parked")) == (Place.RAM, {3, 4})


def test_jobs_take_turns_where_there_is_no_room_for_all(shm: Path, place: Path, actor: Actor) -> None:
    """Three jobs in turns, as on one device, where there is room for two slots."""
    disk = RamDisk(shm / "small", 18 * MIB, spill_directory=place)
    jobs = {name: actor(disk) for name in "abc"}
    for value, (name, job) in enumerate(jobs.items(), start=1):
        assert job.ask("open", job=name) == ("ok", None)
        for _ in range(2):
            assert job.ask("save", boundary=value, nbytes=5 * MIB)[0] == "ok"
        assert job.ask("park") == ("ok", None)
    for value, job in enumerate(jobs.values(), start=1):
        assert job.ask("come_back") == ("ok", [value, value])
        assert job.ask("save", boundary=value + 10, nbytes=5 * MIB)[0] == "ok"
        assert job.ask("park") == ("ok", None)
    assert jobs["a"].ask("come_back") == ("ok", [11, 11])
    assert disk.used_bytes <= disk.limit_bytes


def test_a_job_that_was_spilled_is_bit_for_bit_as_before(disk: RamDisk, store: JobStore, job: Job) -> None:
    before = job.digest()
    switch = Switch(FaultyDevice(), store)
    for boundary in (1, 2, 3):
        switch.suspend(boundary=boundary)
        assert switch.snapshot is not None
        with spilled(store, switch.snapshot):
            assert mapped(disk) == 0
            disturb()
        record = switch.resume()
        assert job.digest() == before
        assert record.fetch_s > 0
        assert record.resume_s >= record.fetch_s
        job.step()
        before = job.digest()


@pytest.mark.parametrize("part", ["header", "large", "small", "metadata", "table", "record", "end"])
def test_a_wrong_byte_keeps_the_job_parked(
    disk: RamDisk, store: JobStore, place: Path, job: Job, part: str
) -> None:
    big = torch.arange(600_000)
    before, held = job.digest(), big.clone()
    switch = Switch(FaultyDevice(), store)
    switch.suspend(boundary=1, named={"big": big}, restartable=True)
    snapshot = switch.snapshot
    assert snapshot is not None
    record = snapshot.record
    sizes = snapshot.content.layout.sizes
    at = {
        "header": record.payload - 1,
        "large": snapshot.offsets[sizes.index(max(sizes))] + MIB,
        "small": snapshot.offsets[sizes.index(min(filter(None, sizes)))],
        "metadata": record.tail + 3,
        "table": record.table,
        "record": record.position + 30,
        "end": record.file_len,
    }[part]
    with spilled(store, snapshot):
        path = place / "a.r0.A.gsnp"
        whole = path.read_bytes()
        path.write_bytes(
            whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] if at < len(whole) else whole + b"!"
        )
    for _ in range(2):
        with pytest.raises(SnapshotError, match=r"a\.r0\.A\.gsnp"):
            switch.resume()
        assert switch.suspended
        assert files(store.directory) == []
        assert files(place) == ["a.r0.A.gsnp"]
    path.write_bytes(whole)
    switch.resume()
    assert job.digest() == before
    assert torch.equal(big, held)


def test_another_snapshot_in_its_place_is_refused(store: JobStore, place: Path, save: Save) -> None:
    save(store, boundary=1, restartable=False)
    older = (store.directory / "A.gsnp").read_bytes()
    snapshot = save(store, boundary=2, restartable=False)
    with spilled(store, snapshot):
        (place / "a.r0.A.gsnp").write_bytes(older)
    with pytest.raises(CorruptSnapshotError, match="another snapshot than the one that was spilled"):
        store.bring_back(snapshot)


def test_without_room_to_come_back_it_is_read_where_it_is(
    disk: RamDisk, store: JobStore, place: Path, job: Job
) -> None:
    before = job.digest()
    switch = Switch(FaultyDevice(), store)
    switch.suspend(boundary=1, named={"model": job.model}, restartable=True)
    assert switch.snapshot is not None
    with disk.open_store("other") as other:
        with spilled(store, switch.snapshot):
            other.begin(Layout((StorageSpec(61 * MIB),))).abort()
        switch.resume()
        assert job.digest() == before
        assert (disk.listing()[0].place, disk.boundaries("a")) == (Place.SPILLED, {1})
        assert files(store.directory) == []
    # It is still what a restart would begin with, until the next one is there.
    switch.suspend(boundary=2, named={"model": job.model}, restartable=True)
    assert disk.boundaries("a") == {1, 2}
    assert files(place) == ["a.r0.A.gsnp"]
    switch.resume()
    switch.suspend(boundary=3, named={"model": job.model}, restartable=True)
    assert (files(place), disk.boundaries("a")) == ([], {2, 3})
    switch.resume()
    assert job.digest() == before


def test_a_job_that_ends_leaves_nothing_in_either_place(disk: RamDisk, place: Path, save: Save) -> None:
    for keep, left in [(False, []), (True, ["a.r0.B.gsnp"])]:
        store = disk.open_store("a")
        save(store, boundary=1)
        snapshot = save(store, boundary=2)
        with spilled(store, snapshot):
            assert files(place) == ["a.r0.A.gsnp", "a.r0.B.gsnp"]
        store.close(keep=keep)
        assert files(place) == left
        assert os.listdir(disk.directory) == ["lock"]
    with disk.open_store("a") as store:
        assert list(store.restartable()) == [2]


def test_forgotten_boundaries_are_forgotten_in_both_places(
    disk: RamDisk, store: JobStore, save: Save
) -> None:
    save(store, boundary=1)
    snapshot = save(store, boundary=2)
    with spilled(store, snapshot):
        pass
    store.forget_after(1)
    assert disk.boundaries("a") == {1}
    store.forget_after(0)
    assert disk.boundaries("a") == set()


def test_an_arena_without_a_snapshot_is_dropped_and_not_moved(
    store: JobStore, place: Path, save: Save
) -> None:
    snapshot = save(store, boundary=1)
    store.begin(Layout((StorageSpec(MIB),))).abort()
    assert files(store.directory) == ["A.gsnp", "B.gsnp"]
    with store.offering(snapshot):
        assert request_room(store.directory)
        assert (files(store.directory), files(place)) == (["A.gsnp"], [])
        assert request_room(store.directory)
        assert (files(store.directory), files(place)) == ([], ["a.r0.A.gsnp"])
    store.bring_back(snapshot)
    assert holds(snapshot, 1)
    assert save(store, boundary=2).path.name == "B.gsnp"


def test_many_moves_leave_threads_files_descriptors_and_mappings_level(
    disk: RamDisk, store: JobStore, place: Path, save: Save
) -> None:
    def level() -> tuple[object, ...]:
        descriptors = len(os.listdir("/proc/self/fd"))
        return disk.used_bytes, files(place), descriptors, mapped(disk), threading.active_count()

    before = None
    for _ in range(30):
        snapshot = save(store, sizes=(1000,), restartable=False)
        with spilled(store, snapshot):
            pass
        store.bring_back(snapshot)
        snapshot.close()
        now = level()
        assert before in (None, now)
        before = now


def test_devices_let_go_of_what_is_moved(store: JobStore, save: Save) -> None:
    locked: list[memoryview] = []
    store.bind(locked.append, lambda memory: locked.remove(memory))
    snapshot = save(store, boundary=1)
    assert len(locked) == 1
    with spilled(store, snapshot):
        assert locked == []
    store.bring_back(snapshot)
    assert locked == []
    assert holds(snapshot, 1)


def test_only_a_tenant_s_own_jobs_make_room_under_its_limit(shm: Path, place: Path, save: Save) -> None:
    def of(name: str) -> RamDisk:
        return RamDisk(shm / "disk", 256 * MIB, spill_directory=place, tenant=Tenant(name, 40 * MIB))

    ours, theirs = of("vision"), of("audio")
    with ours.open_store("a") as mine, ours.open_store("b") as next_one, theirs.open_store("c") as other:
        parked = [save(store, boundary=1, sizes=(20 * MIB,)) for store in (mine, other)]
        with mine.offering(parked[0]), other.offering(parked[1]):
            save(next_one, boundary=1, sizes=(30 * MIB,)).verify()
        assert files(place) == ["a.r0.A.gsnp"]
        assert [info.used_bytes < 40 * MIB for info in ours.tenants()] == [True, True]
