"""Snapshots copied while the training goes on: exact, or not there at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.background_snapshot import BackgroundSnapshot
from gpuslice.errors import RamDiskFullError, UsageError
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.kernels.transfer import Checksums, Inspector, Pairs, Transfer
from gpuslice.types import DeviceName

from ...patience import PATIENCE_S


class HeldDevice(CpuDevice):
    """The host, with a copy in the background that goes on when told to."""

    def __init__(self) -> None:
        super().__init__(DeviceName.parse("cpu"))
        self.gate = threading.Event()
        self.fault: Exception | None = None
        self.waiting: set[int] = set()

    def copy_out(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        if threading.current_thread() is not threading.main_thread():
            self.waiting = {storage._cdata for storage, _ in pairs}
            assert self.gate.wait(PATIENCE_S)
            if self.fault is not None:
                raise self.fault
        return super().copy_out(pairs, arena, inspect, checksums)


class Training:
    """A network with buffers and an optimizer with state, all large enough to wait."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(160, 160), torch.nn.BatchNorm1d(160))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.average = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.forward_backward()
        self.optimizer.step()

    @property
    def named(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "average": self.average}

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.model[0].weight  # type: ignore[assignment]
        return weight

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 160)).square().mean().backward()

    def state(self) -> dict[str, torch.Tensor]:
        """Clones of everything, by the paths of a snapshot."""
        state = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for index, parameter in enumerate(self.model.parameters()):
            for key, value in self.optimizer.state[parameter].items():
                state[f"optimizer.state[{index}][{key!r}]"] = value
            state[f"average[{index}]"] = self.average[index]
        return {path: tensor.detach().clone() for path, tensor in state.items()}


@pytest.fixture
def device() -> HeldDevice:
    return HeldDevice()


@pytest.fixture
def store(disk: RamDisk) -> Iterator[JobStore]:
    with disk.open_store("training") as opened:
        yield opened


def begin(device: HeldDevice, store: JobStore, training: Training, **options: Any) -> BackgroundSnapshot:
    return BackgroundSnapshot(device, store, training.named, **{"boundary": 1, **options})


def differing(snapshot: SnapshotFile, state: dict[str, torch.Tensor]) -> set[str]:
    """The tensors whose bytes in the snapshot are not those of ``state``."""
    assert state.keys() <= {tensor.path for tensor in snapshot.tensors}
    found = set()
    for tensor in snapshot.tensors:
        if tensor.path in state:
            expected = state[tensor.path].reshape(-1).view(torch.uint8).numpy().tobytes()
            start = tensor.offset * state[tensor.path].element_size()
            if bytes(snapshot.view(tensor.sid))[start : start + len(expected)] != expected:
                found.add(tensor.path)
    return found


def test_what_changes_in_the_next_forward_pass_does_not_wait(device: HeldDevice, store: JobStore) -> None:
    training = Training()
    at_boundary = training.state()
    snapshot = begin(device, store, training)
    training.forward_backward()  # BatchNorm's running statistics change
    for average in training.average:
        average.add_(1)
    assert not snapshot.copied
    device.gate.set()
    snapshot.check()
    training.optimizer.step()
    published = snapshot.settle()
    assert published is not None
    assert published.restartable
    with open_snapshot(published.path) as opened:
        opened.verify()
        assert differing(opened, at_boundary) == set()
        # They did change since: a later copy would have been seen.
        assert {"model.1.running_mean", "average[0]", "model.0.weight"} <= differing(opened, training.state())
    state = training.optimizer.state[training.weight]
    large = [training.weight, state["exp_avg"], state["exp_avg_sq"]]
    assert device.waiting == {tensor.untyped_storage()._cdata for tensor in large}


@pytest.mark.usefixtures("no_more_threads")
def test_without_more_threads_the_training_copies_and_publishes_itself(store: JobStore) -> None:
    training = Training()
    snapshot = BackgroundSnapshot(CpuDevice(DeviceName.parse("cpu")), store, training.named, boundary=1)
    assert snapshot.copied
    snapshot.check()
    for _ in range(2):
        snapshot.publish_soon()
        assert snapshot.over
    at_boundary = training.state()
    training.forward_backward()
    training.optimizer.step()
    published = snapshot.settle()
    assert published is not None
    assert differing(published, at_boundary) == set()


def test_a_step_that_does_not_wait_is_noticed(device: HeldDevice, store: JobStore) -> None:
    training = Training()
    device.gate.set()
    first = begin(device, store, training).settle()
    device.gate.clear()
    second = begin(device, store, training, boundary=2)
    training.forward_backward()
    training.optimizer.step()  # without `check` before it
    device.gate.set()
    assert second.settle() is None
    assert set(second.changed) == {
        "model.0.weight",
        "optimizer.state[0]['exp_avg']",
        "optimizer.state[0]['exp_avg_sq']",
    }
    assert first is not None
    assert list(store.restartable()) == [1]
    # What changed is copied at once the next time.
    device.gate.clear()
    at_boundary = training.state()
    third = begin(device, store, training, boundary=3, copy_at_once=second.changed)
    training.forward_backward()
    training.optimizer.step()
    device.gate.set()
    published = third.settle()
    assert published is not None
    assert differing(published, at_boundary) == set()


def test_the_comparison_sees_a_torn_copy(
    device: HeldDevice, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    at_boundary = training.state()
    snapshot = begin(device, store, training)
    monkeypatch.setattr(snapshot, "_watched", [])
    snapshot._deferred._digests.clear()
    training.forward_backward()
    training.optimizer.step()
    device.gate.set()
    published = snapshot.settle()
    assert published is not None
    assert "model.0.weight" in differing(published, at_boundary)


@pytest.mark.parametrize(
    "look",
    [
        lambda weight: weight.detach()[1:],
        lambda weight: weight.data,
        lambda weight: weight.detach().numpy(),
        lambda weight: weight.square().sum(),
    ],
    ids=["view", "data", "numpy", "graph"],
)
def test_memory_that_somebody_else_could_change_does_not_wait(
    device: HeldDevice, store: JobStore, look: Callable[[torch.Tensor], object]
) -> None:
    training = Training()
    other = look(training.weight)
    snapshot = begin(device, store, training)
    device.gate.set()
    assert snapshot.settle() is not None
    graph = isinstance(other, torch.Tensor) and other.grad_fn is not None
    assert (training.weight.untyped_storage()._cdata in device.waiting) is graph


def _through_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[:] = 7


def _through_data(weight: torch.Tensor) -> None:
    weight.data.mul_(2)


def _through_dlpack(weight: torch.Tensor) -> None:
    torch.from_dlpack(weight.detach()).zero_()


WRITES = pytest.mark.parametrize(
    "write", [_through_numpy, _through_data, _through_dlpack], ids=lambda write: write.__name__
)


@WRITES
def test_a_write_that_torch_does_not_count_is_noticed(
    device: HeldDevice, store: JobStore, write: Callable[[torch.Tensor], None]
) -> None:
    training = Training()
    snapshot = begin(device, store, training)
    version = training.weight._version
    write(training.weight)
    assert training.weight._version == version
    device.gate.set()
    assert snapshot.settle() is None
    assert (snapshot.changed, snapshot.error) == (("model.0.weight",), None)


@WRITES
def test_such_a_write_does_no_harm_when_all_is_copied(
    device: HeldDevice, store: JobStore, write: Callable[[torch.Tensor], None]
) -> None:
    training = Training()
    at_boundary = training.state()
    device.gate.set()
    snapshot = begin(device, store, training)
    snapshot._copier.join()
    write(training.weight)
    published = snapshot.settle()
    assert published is not None
    assert differing(published, at_boundary) == set()


def content(storage: torch.UntypedStorage) -> bytes:
    return torch.empty(0, dtype=torch.uint8).set_(storage).clone().numpy().tobytes()


class SummingDevice(HeldDevice):
    """Makes checksums of what waits, as a GPU does."""

    def copy_out(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        if checksums is not None:
            pairs = [
                (storage, offset)
                for storage, offset in pairs
                if not checksums.note(offset, storage.nbytes(), hash(content(storage)))
            ]
        return super().copy_out(pairs, arena, inspect)


@WRITES
@pytest.mark.parametrize("early", [False, True], ids=["afterwards", "before it is copied"])
def test_a_device_that_makes_checksums_notices_it_by_these(
    store: JobStore, write: Callable[[torch.Tensor], None], early: bool
) -> None:
    device, training = SummingDevice(), Training()
    snapshot = begin(device, store, training)
    if not early:
        device.gate.set()
        snapshot._copier.join()
    write(training.weight)
    device.gate.set()
    assert snapshot.settle() is None
    assert (snapshot.changed, snapshot.error) == (("model.0.weight",), None)


def test_a_device_that_makes_checksums_copies_all(store: JobStore) -> None:
    device, training = SummingDevice(), Training()
    at_boundary = training.state()
    device.gate.set()
    published = begin(device, store, training).settle()
    assert published is not None
    assert differing(published, at_boundary) == set()


def test_a_new_storage_leaves_the_one_that_is_copied_as_it_was(device: HeldDevice, store: JobStore) -> None:
    training = Training()
    at_boundary = training.state()
    snapshot = begin(device, store, training)
    training.weight.data = torch.zeros_like(training.weight)
    device.gate.set()
    published = snapshot.settle()
    assert published is not None
    assert differing(published, at_boundary) == set()


def test_tied_parameters_wait_once(device: HeldDevice, store: JobStore) -> None:
    training = Training()
    training.model.append(torch.nn.Linear(160, 160))
    training.model[2].weight = training.model[0].weight
    snapshot = begin(device, store, training)
    device.gate.set()
    published = snapshot.settle()
    assert published is not None
    assert training.weight.untyped_storage()._cdata in device.waiting
    assert len({t.sid for t in published.tensors if t.path in ("model.0.weight", "model.2.weight")}) == 1


def test_an_optimizer_that_saves_itself_does_not_wait(device: HeldDevice, store: JobStore) -> None:
    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict()

    training = Training()
    training.optimizer = Own(training.model.parameters(), lr=0.1)  # type: ignore[assignment]
    snapshot = begin(device, store, training)
    device.gate.set()
    assert snapshot.settle() is not None
    assert device.waiting == set()


def test_a_copy_that_fails_leaves_the_older_snapshot(device: HeldDevice, store: JobStore) -> None:
    training = Training()
    device.gate.set()
    begin(device, store, training).settle()
    device.fault = OSError("the device is gone")
    failed = begin(device, store, training, boundary=2)
    assert failed.settle() is None
    assert failed.error is device.fault
    device.fault = None
    assert list(store.restartable()) == [1]
    assert begin(device, store, training, boundary=3).settle() is not None
    assert sorted(store.restartable()) == [1, 3]


def test_a_signal_while_the_device_is_awaited_leaves_the_store_of_use(
    device: HeldDevice, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    training = Training()
    with monkeypatch.context() as patch:
        patch.setattr(device, "synchronize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            begin(device, store, training)
    device.gate.set()
    assert begin(device, store, training).settle() is not None


def test_one_that_is_not_wanted_is_given_up(device: HeldDevice, store: JobStore) -> None:
    training = Training()
    snapshot = begin(device, store, training)
    device.gate.set()
    assert snapshot.settle(keep=False) is None
    assert store.restartable() == {}


def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    device: HeldDevice, store: JobStore, disk: RamDisk
) -> None:
    training = Training()
    with pytest.raises(UsageError, match="function"):
        BackgroundSnapshot(device, store, {**training.named, "fn": print}, boundary=1)
    disk._budget.limit_bytes = disk.used_bytes + 4096
    with pytest.raises(RamDiskFullError):
        begin(device, store, training)
    disk._budget.limit_bytes = 1 << 30
    device.gate.set()
    assert begin(device, store, training).settle() is not None
