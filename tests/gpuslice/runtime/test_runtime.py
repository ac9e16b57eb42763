"""One process of a job: where it is, what it may do, what it leaves behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.config import Settings
from gpuslice.errors import ConfigError, EnvironmentUnusableError, RamDiskFullError, UsageError
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime import ending, trainings
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.common_snapshots import Announcements, CommonSnapshots
from gpuslice.runtime.runtime import Runtime
from gpuslice.runtime.shared_value import SharedValue
from gpuslice.runtime.stopping import Act, Obstacle, Wish
from gpuslice.types import DeviceName


class Script:
    """What an attached job tells the runtime."""

    replicated = False
    samples = 0
    interruptible = True
    restartable_later = True
    obstacle = ""

    def __init__(self) -> None:
        self.weights = torch.arange(50_000.0)

    def named_state(self) -> dict[str, object]:
        return {"weights": self.weights}

    def restartable(self, *, explicit: bool) -> bool:
        return explicit


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(ramdisk_dir=str(tmp_path / "ramdisk"), report=str(tmp_path / "report.json"))


@pytest.fixture
def job(settings: Settings) -> Iterator[Runtime]:
    runtime = Runtime(settings, RankIdentity(), BoundaryCounter())
    yield runtime
    trainings.close(runtime)


@pytest.mark.parametrize(
    ("environ", "identity"),
    [
        ({}, RankIdentity(0, 0, 1)),
        (
            {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            RankIdentity(3, 1, 4, 2),
        ),
        ({"RANK": "3", "WORLD_SIZE": "4"}, RankIdentity(3, 3, 4, 4)),
    ],
)
def test_the_environment_tells_the_rank(environ: dict[str, str], identity: RankIdentity) -> None:
    assert RankIdentity.from_environ(environ) == identity


@pytest.mark.parametrize("text", ["", "one", "-1", "²", "1.0", "9" * 400, "99999"])
def test_what_is_no_number_of_a_rank_is_refused_by_name(text: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        with pytest.raises(ConfigError, match=f"{name} is"):
            RankIdentity.from_environ({name: text})


def test_a_job_whose_state_is_not_at_hand_is_not_suspended(job: Runtime) -> None:
    script = job.attached = Script()
    assert job.suspension.obstacle() is Obstacle.NONE
    script.interruptible = False
    assert job.suspension.obstacle() is Obstacle.CHANGE


@pytest.mark.parametrize("explicit", [True, False])
def test_it_tells_of_later_boundaries_only_if_this_one_is_no_place_for_a_restart(
    job: Runtime, explicit: bool
) -> None:
    job.suspension.suspend(explicit=explicit)
    assert not job.suspension.restartable_later, "it is not attached"
    job.suspension.resume()
    job.attached = Script()
    job.suspension.suspend(explicit=explicit)
    assert job.suspension.restartable_later == (not explicit)
    job.suspension.resume()


def test_each_rank_of_a_node_has_a_device_of_its_own() -> None:
    identity = RankIdentity(rank=5, local_rank=1, world_size=8)
    assert identity.device(DeviceName("cuda", 2)) == DeviceName("cuda", 3)
    assert identity.device(DeviceName("cpu", None)) == DeviceName("cpu", None)


def test_a_device_that_nobody_named_is_the_host_until_a_gpu_is_used(job: Runtime) -> None:
    assert not job.suspension.in_use.known
    assert job.suspension.obstacle() is Obstacle.NONE
    assert job.suspension.suspend(explicit=False).device == "cpu"
    job.suspension.resume()


def test_a_named_device_is_never_looked_for() -> None:
    assert Runtime(Settings(device="cpu"), RankIdentity(), BoundaryCounter()).suspension.in_use.known


def test_a_route_that_does_not_exist_here_is_refused_before_anything_else() -> None:
    with pytest.raises(EnvironmentUnusableError, match="vmm"):
        Runtime(Settings(device="cpu", route="vmm"), RankIdentity(), BoundaryCounter())


def test_a_switch_is_in_the_report_and_changes_nothing(job: Runtime, tmp_path: Path) -> None:
    tensor = torch.arange(50_000.0)
    before = tensor.clone()
    job.boundaries.count = 7
    job.suspension.suspend(explicit=False)
    assert job.suspension.away
    assert tensor.untyped_storage().nbytes() == 0
    job.suspension.resume()
    assert not job.suspension.away
    assert torch.equal(tensor, before)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [switch["boundary"] for switch in report["switches"]] == [7]
    assert "1 switch at 7 boundaries" in job.summary()
    assert "route tensor" in job.summary()


def test_the_arena_is_made_ready_after_the_second_step(job: Runtime) -> None:
    tensor = torch.arange(50_000.0)
    before = tensor.clone()
    job.suspension.keep_ready()
    assert job.suspension.slot_preparation is not None
    for steps in range(4):
        assert (job.suspension.slot_preparation.warming is not None) == (steps > 2)
        job.boundaries.steps = steps
        job.boundaries.mark()
    assert job.suspension.slot_preparation.warming is not None
    job.suspension.slot_preparation.warming.join()
    job.suspension.suspend(explicit=False)
    assert not job.suspension.resume().cold
    assert torch.equal(tensor, before)


def test_a_rank_of_a_gang_that_failed_keeps_its_snapshots_but_no_thread(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())  # threads of other tests among them
    monkeypatch.setattr("gpuslice.runtime.trainings.ended_well", lambda: False)
    named = msgspec.structs.replace(settings, job="gang")
    job = Runtime(named, RankIdentity(0, 0, 2, 1), BoundaryCounter())
    job.attached = Script()
    job.suspension.keep_ready()
    job.suspension.suspend(explicit=True)
    job.suspension.resume()
    assert job.suspension.slot_preparation is not None
    assert job.suspension.slot_preparation.warming is not None
    trainings.close(job)
    assert not [
        thread for thread in set(threading.enumerate()) - before if thread.name.startswith("gpuslice-")
    ]
    assert list(job.storage.store.directory.glob("*.gsnp"))
    job.boundaries.mark()  # exit handlers may train


def test_a_rank_of_a_gang_says_which_snapshots_it_has(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = dist.HashStore()
    limited = msgspec.structs.replace(settings, job="gang", ramdisk_limit="5MiB")
    job = Runtime(limited, RankIdentity(0, 0, 2, 1), BoundaryCounter())
    job.attached = Script()
    value, at_next = SharedValue(lambda: group), job.boundaries.call_at_next
    job.common_snapshots = CommonSnapshots(job.storage.store, 0, [set(), set()], at_next, value)

    def said() -> tuple[tuple[int, ...], int | None]:
        mine = msgspec.json.decode(group.get("gpuslice/snapshots"), type=Announcements)[0]
        return mine.has, mine.writing

    assert said() == ((), None)
    job.boundaries.count = 2
    assert job.saving.take(explicit=True)
    assert said() == ((), 2)
    job.checkpoints.settle()
    assert said() == ((2,), None)
    job.attached.weights = torch.arange(1e6)
    job.boundaries.count = 4
    with pytest.raises(RamDiskFullError):
        job.saving.take(explicit=True)
    assert said() == ((2,), None), "nobody is to wait for it"
    job.attached.weights = torch.arange(1e3)
    job.suspension.suspend(explicit=True)
    assert said() == ((2, 4), None)
    job.suspension.resume()
    monkeypatch.setattr("gpuslice.runtime.trainings.ended_well", lambda: True)
    trainings.close(job)
    assert said() == ((2, 4), None), "the store may have gone before"


def test_it_listens_once_at_a_boundary_whatever_it_has_begun(settings: Settings) -> None:
    group, asked = dist.HashStore(), []
    job = Runtime(msgspec.structs.replace(settings, job="gang"), RankIdentity(0, 0, 2, 1), BoundaryCounter())
    common = CommonSnapshots(job.storage.store, 0, [set(), set()], asked.append, SharedValue(lambda: group))
    assert common.make_room(2)
    common.keep()
    assert len(asked) == 1
    asked[0](3)
    assert len(asked) == 2, "it has yet to publish its own"
    trainings.close(job)


def test_it_listens_until_the_others_have_what_it_has(settings: Settings) -> None:
    group = dist.HashStore()
    named = msgspec.structs.replace(settings, job="gang")
    ranks = [Runtime(named, RankIdentity(rank, rank, 2, 2), BoundaryCounter()) for rank in range(2)]
    asked: list[str] = []
    for rank, one in enumerate(ranks):
        one.attached, one.boundaries.count = Script(), 2
        value, at_next = SharedValue(lambda: group), one.boundaries.call_at_next
        one.common_snapshots = CommonSnapshots(one.storage.store, rank, [set(), set()], at_next, value)
        assert one.saving.take(explicit=True)
    first, second = ranks
    update = first.common_snapshots._value.update  # type: ignore[union-attr]
    first.common_snapshots._value.update = lambda change: asked.append("") or update(change)  # type: ignore[union-attr, method-assign, func-returns-value]
    first.boundaries.mark()
    assert not asked, "it has yet to publish its own"
    first.checkpoints.settle()
    del asked[:]
    for boundary in range(2):
        first.boundaries.mark()
        assert len(asked) == boundary + 1
    second.checkpoints.settle()
    for _ in range(2):
        first.boundaries.mark()
    assert len(asked) == 3
    for one in ranks:
        trainings.close(one)


def test_a_boundary_at_which_it_cannot_be_suspended_is_no_reason_to_prepare_never(job: Runtime) -> None:
    job.suspension.keep_ready()
    assert job.suspension.slot_preparation is not None
    job.boundaries.steps = 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpuslice.checkpoint.discover.pending_collectives.pending", lambda: True)
        job.boundaries.mark()
    assert job.suspension.slot_preparation.warming is None
    job.boundaries.mark()
    assert job.suspension.slot_preparation.warming is not None
    job.suspension.slot_preparation.warming.join()


def test_a_ram_disk_that_cannot_be_used_stops_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    job = Runtime(Settings(ramdisk_dir=str(tmp_path / "file")), RankIdentity(), BoundaryCounter())
    job.suspension.keep_ready()
    job.boundaries.steps = 2
    job.boundaries.mark()
    assert job.suspension.slot_preparation is not None
    assert job.suspension.slot_preparation.warming is None


def test_a_job_may_move_to_another_device_of_its_kind(job: Runtime) -> None:
    job.suspension.suspend(explicit=False)
    job.suspension.resume(DeviceName("cpu", None))
    assert str(job.suspension.in_use.device.name) == "cpu"


def test_no_parking_inside_backward(job: Runtime) -> None:
    found = []
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda gradient: found.append(job.suspension.obstacle()))
    weight.sum().backward()
    assert found == [Obstacle.BACKWARD]
    assert job.suspension.obstacle() is Obstacle.NONE


def test_no_parking_within_a_function_transform(job: Runtime) -> None:
    """As at a boundary that the script marks, or a batch that it fetches, in what it has transformed."""
    seen: list[Act] = []

    def at_boundary() -> Act:
        return job.suspension.at_boundary(Wish.PARK)

    torch.func.vmap(lambda x: seen.append(at_boundary()) or x)(torch.ones(2))
    assert (seen, at_boundary()) == ([Act.PASS_BY], Act.PARK)


def test_the_launcher_s_name_for_the_job_wins(settings: Settings) -> None:
    named = Runtime(Settings(job="from-launcher"), RankIdentity(), BoundaryCounter())
    trainings.name_job(named, "from-script")
    assert named.settings.job == "from-launcher"
    nameless = Runtime(Settings(), RankIdentity(), BoundaryCounter())
    trainings.name_job(nameless, "from-script")
    assert (nameless.settings.job, nameless.report.job) == ("from-script", "from-script")
    with pytest.raises(UsageError, match="job name"):
        trainings.name_job(Runtime(Settings(), RankIdentity(), BoundaryCounter()), "no/name")


@pytest.mark.parametrize("explicit", [True, False])
def test_a_snapshot_is_restartable_if_the_script_says_so(job: Runtime, explicit: bool) -> None:
    job.attached = Script()
    job.suspension.suspend(explicit=explicit)
    snapshot = job.suspension.switch.snapshot
    assert snapshot is not None
    assert snapshot.restartable is explicit
    assert [tensor.path for tensor in snapshot.tensors] == ["weights"]
    job.suspension.resume()


@pytest.mark.parametrize(
    ("name", "well", "handed_out", "kept"),
    [
        ("named", True, False, False),
        ("named", False, False, True),
        ("", True, False, False),
        ("", False, False, False),
        ("", True, True, True),
    ],
)
def test_what_stays_in_the_ram_disk(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, name: str, well: bool, handed_out: bool, kept: bool
) -> None:
    """Of a named job that ended badly, or of a nameless one whose script has the path."""
    job = Runtime(settings, RankIdentity(), BoundaryCounter())
    if name:
        trainings.name_job(job, name)
    job.attached, job.attachments = Script(), 1
    job.suspension.suspend(explicit=True)
    job.suspension.resume()
    job.storage.store.handed_out = handed_out
    monkeypatch.setattr(ending, "_exit_status", 0 if well else 1)
    monkeypatch.delattr("sys.last_value", raising=False)
    trainings.close(job)
    stores = RamDisk(Path(settings.ramdisk_dir)).listing()
    assert [store.restartable for store in stores] == ([True] if kept else [])
