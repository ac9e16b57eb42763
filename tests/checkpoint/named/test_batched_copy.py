"""Copies out of a snapshot that are collected and done at once, with the result of doing them in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gpuslice.checkpoint.format.layout import TensorSpec
from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.named.batched_copy import BatchedCopy
from gpuslice.checkpoint.named.state import check, describe
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.capture_plan import plan_capture
from gpuslice.errors import CorruptSnapshotError
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.types import DeviceName

Pattern = Callable[[int, int, int], bytes]


@pytest.fixture
def snapshot(snapshot_path: Path) -> Iterator[SnapshotFile]:
    with open_snapshot(snapshot_path) as opened:
        yield opened


def spec(offset: int, *shape: int, sid: int = 0) -> TensorSpec:
    stride = torch.empty(shape).stride()
    return TensorSpec("t", sid, "uint8", shape, stride, offset)


def held(snapshot: SnapshotFile, start: int, count: int) -> list[int]:
    return list(snapshot.view(0)[start : start + count])


def test_copies_wait_until_they_are_delivered(snapshot: SnapshotFile) -> None:
    batch, live = BatchedCopy(snapshot), torch.zeros(5, 20, dtype=torch.uint8)
    before = live._version
    assert batch.take([live], [spec(3, 5, 20)])
    assert live._version > before  # a pending graph must not use what it saved
    (made,) = batch.new([spec(0, snapshot.storages[1].nbytes, sid=1)])
    batch.deliver()
    assert live.flatten().tolist() == held(snapshot, 3, 100)
    assert bytes(made.tolist()) == bytes(snapshot.view(1))


def test_of_views_of_one_memory_the_last_one_counts(snapshot: SnapshotFile) -> None:
    batch, live = BatchedCopy(snapshot), torch.zeros(200, dtype=torch.uint8)
    for view, start in ((live[:100], 0), (live[50:150], 1000), (live[50:150], 3000), (live[140:160], 7)):
        assert batch.take([view], [spec(start, len(view))])
    batch.deliver()
    expected = held(snapshot, 0, 50) + held(snapshot, 3000, 90) + held(snapshot, 7, 20) + [0] * 40
    assert live.tolist() == expected


def test_what_is_dropped_is_not_copied(snapshot: SnapshotFile) -> None:
    batch, live = BatchedCopy(snapshot), torch.zeros(9, dtype=torch.uint8)
    assert batch.take([live], [spec(0, 9)])
    batch.drop()
    batch.deliver()
    assert not live.any()


def test_what_is_not_in_one_piece_is_left_to_others(snapshot: SnapshotFile) -> None:
    batch = BatchedCopy(snapshot)
    assert not batch.take([torch.zeros(4, 6, dtype=torch.uint8).t()], [spec(0, 6, 4)])
    with torch.inference_mode():
        assert not batch.take([torch.zeros(6, dtype=torch.uint8)], [spec(0, 6)])


def trained(seed: int) -> tuple[torch.nn.Linear, torch.optim.Adam]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def saved(store: JobStore, named: dict[str, object]) -> SnapshotFile:
    state = describe(named)
    device = CpuDevice(DeviceName("cpu", None))
    plan = plan_capture(device, (), state.tensors, alone=True)
    writer = store.begin(plan.layout)
    plan.copy_out(device, writer)
    return writer.publish(state.tree, plan.tensors, boundary=1, restartable=True)


@pytest.mark.parametrize("moments", ["own", "shared", "none"])
def test_an_optimizer_s_state_is_loaded_where_it_is_unless_somebody_shares_it(
    store: JobStore, moments: str
) -> None:
    model, optimizer = trained(1)
    snapshot = saved(store, {"model": model, "optimizer": optimizer})
    other, its = trained(2)
    state = its.state[other.weight]
    if moments == "shared":
        state["exp_avg_sq"] = state["exp_avg"]
    elif moments == "none":
        its.state.clear()
    before = state["exp_avg"]
    check(snapshot, {"model": other, "optimizer": its}).apply()
    assert (its.state[other.weight]["exp_avg"] is before) == (moments == "own")
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for name, value in optimizer.state[mine].items():
            assert torch.equal(value, its.state[theirs][name]), name


def everything(named: dict[str, object]) -> list[tuple[str, bytes]]:
    return [
        (path, tensor.detach().contiguous().numpy().tobytes()) for path, tensor in describe(named).tensors
    ]


@pytest.mark.parametrize("moments", ["own", "none"])
def test_damage_in_whichever_chunk_changes_nothing(store: JobStore, moments: str) -> None:
    """All is compared before anything is loaded, also what is to become new memory."""
    model, optimizer = trained(1)
    snapshot = saved(store, {"model": model, "optimizer": optimizer})
    other, its = trained(2)
    if moments == "none":
        its.state.clear()
    named: dict[str, object] = {"model": other, "optimizer": its}
    before = everything(named)
    chunks = snapshot.content.placement.chunks
    assert len(chunks) == 8  # two parameters, with two moments and a step each
    for start, end in chunks:
        for byte in (start, end - 1):
            flip(snapshot.path, byte)
            with (
                open_snapshot(snapshot.path) as damaged,
                pytest.raises(CorruptSnapshotError, match="damaged"),
            ):
                check(damaged, named)
            flip(snapshot.path, byte)
            assert everything(named) == before
    with open_snapshot(snapshot.path) as whole:
        check(whole, named).apply()
    assert everything(named) == everything({"model": model, "optimizer": optimizer})


def test_only_what_is_needed_has_to_be_whole(store: JobStore) -> None:
    model, optimizer = trained(1)
    snapshot = saved(store, {"model": model, "optimizer": optimizer})
    other, _ = trained(2)
    used = {spec.sid for spec in snapshot.tensors if spec.path.startswith("model.")}
    for storage in snapshot.storages:
        flip(snapshot.path, snapshot.offsets[storage.sid])
        with open_snapshot(snapshot.path) as damaged:
            if storage.sid in used:
                with pytest.raises(CorruptSnapshotError, match=rf"storage {storage.sid} "):
                    check(damaged, {"model": other})
            else:
                check(damaged, {"model": other}).apply()
                assert everything({"model": other}) == everything({"model": model})
        flip(snapshot.path, snapshot.offsets[storage.sid])


def flip(path: Path, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1]))


def test_a_step_on_the_host_is_loaded_where_it_is(store: JobStore) -> None:
    model, optimizer = trained(1)
    snapshot = saved(store, {"model": model, "optimizer": optimizer})
    other, its = trained(2)
    state = its.state[other.weight]
    step = state["step"]
    step.fill_(7)
    check(snapshot, {"model": other, "optimizer": its}).apply()
    assert its.state[other.weight] is state
    assert state["step"] is step
    assert step.item() == 1
