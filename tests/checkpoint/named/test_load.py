"""A model and its optimizer loaded from a snapshot: where to, and what damage does."""

from __future__ import annotations

import pytest
import torch

from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.named.state import check, describe
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.capture_plan import plan_capture
from gpuslice.errors import CorruptSnapshotError
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.types import DeviceName

from ..harness import flip_a_bit


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
    plan = plan_capture(device, (), state.tensors)
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
            flip_a_bit(snapshot.path, byte)
            with (
                open_snapshot(snapshot.path) as damaged,
                pytest.raises(CorruptSnapshotError, match="damaged"),
            ):
                check(damaged, named)
            flip_a_bit(snapshot.path, byte)
            assert everything(named) == before
    with open_snapshot(snapshot.path) as whole:
        check(whole, named).apply()
    assert everything(named) == everything({"model": model, "optimizer": optimizer})


def test_only_what_is_needed_has_to_be_whole(store: JobStore) -> None:
    model, optimizer = trained(1)
    snapshot = saved(store, {"model": model, "optimizer": optimizer})
    other, _ = trained(2)
    used = {spec.sid for spec in snapshot.tensors if spec.path.startswith("model.")}
    for sid in range(len(snapshot.storages)):
        flip_a_bit(snapshot.path, snapshot.offsets[sid])
        with open_snapshot(snapshot.path) as damaged:
            if sid in used:
                with pytest.raises(CorruptSnapshotError, match=rf"storage {sid} "):
                    check(damaged, {"model": other})
            else:
                check(damaged, {"model": other}).apply()
                assert everything({"model": other}) == everything({"model": model})
        flip_a_bit(snapshot.path, snapshot.offsets[sid])


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


def test_a_large_tensor_is_copied_where_it_is_and_counted_as_a_change(store: JobStore) -> None:
    saved_base, live = torch.randn(2, 700, 500), torch.zeros(700, 500)
    snapshot = saved(store, {"x": saved_base[1]})
    before, address = live._version, live.data_ptr()
    check(snapshot, {"x": live}).apply()
    assert torch.equal(live, saved_base[1])
    assert live.data_ptr() == address
    assert live._version > before  # a pending graph must not use what it saved
