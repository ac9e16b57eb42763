"""attach, Job and restore as a script sees them, in one process; test_restart.py has several."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gpuslice
from gpuslice.checkpoint.format import reader
from gpuslice.config import Settings
from gpuslice.errors import (
    DeviceMemoryError,
    RefusedSnapshotError,
    SuspendedStateError,
    SuspendRefusedError,
    UsageError,
)
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.runtime import Runtime

Start = Callable[..., None]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Makes what follows the life of a new process, as far as gpuslice can tell."""
    lives: list[Runtime] = []

    def begin(job: str = "") -> None:
        if lives:
            lives[-1].storage.store.close(keep=True)
        settings = Settings(ramdisk_dir=str(tmp_path / "ramdisk"), ramdisk_limit="64M", job=job)
        lives.append(Runtime(settings, RankIdentity(), BoundaryCounter()))
        monkeypatch.setattr("gpuslice.runtime.job.runtime", lambda: lives[-1])

    begin()
    yield begin
    lives[-1].storage.store.close(keep=False)


def weights(model: nn.Module) -> list[object]:
    return [parameter.tolist() for parameter in model.parameters()]


def test_suspend_frees_the_memory_and_resume_brings_it_back(start: Start) -> None:
    model = nn.Linear(300, 300)
    before = weights(model)
    job = gpuslice.attach(model=model)
    snapshot = job.suspend()
    assert model.weight.untyped_storage().nbytes() == 0
    assert snapshot.path.exists()
    assert snapshot.nbytes >= 300 * 300 * 4
    assert snapshot.seconds > 0
    assert snapshot.gb_per_s > 0
    assert snapshot.restartable
    job.resume()
    assert weights(model) == before
    with job.suspended() as again:
        assert again.path != snapshot.path
        assert model.weight.untyped_storage().nbytes() == 0
    assert weights(model) == before


def test_touching_what_is_suspended_is_an_error_until_it_is_resumed(start: Start) -> None:
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    before, total = weights(model), model.weight.sum().item()
    job = gpuslice.attach(model=model, optimizer=optimizer)
    job.suspend()
    for touch in (model.weight.sum, lambda: repr(model.weight), optimizer.step):
        with pytest.raises(gpuslice.TensorParkedError, match=r"job\.resume\(\)"):
            touch()
    with pytest.raises(gpuslice.TensorParkedError), ThreadPoolExecutor(1) as pool:
        pool.submit(model.weight.sum).result()
    assert model.weight.shape == (300, 300)
    job.resume()
    assert weights(model) == before
    assert model.weight.sum().item() == total
    optimizer.step()


def test_arrays_that_share_memory_with_a_suspended_tensor_stay_valid(start: Start) -> None:
    """Reading one cannot raise, so its memory has to stay, and what is written must not be lost."""
    shown, given = torch.arange(100_000.0), torch.arange(100_000.0)
    arrays = {"numpy": shown.numpy(), "DLPack": np.from_dlpack(given), "owner": np.arange(100_000.0)}
    owned = torch.from_numpy(arrays["owner"])
    pending = torch.ones(100_000, requires_grad=True)
    loss = (pending * pending).sum()
    job = gpuslice.attach(shown=shown, given=given, owned=owned, pending=pending)
    job.suspend()
    for array in arrays.values():
        assert np.array_equal(array, np.arange(100_000))
        array[7] = -1
    for tensor in (shown, given, owned, pending):
        with pytest.raises(gpuslice.TensorParkedError):
            tensor.sum()
    with pytest.raises(gpuslice.TensorParkedError):
        loss.backward(retain_graph=True)
    job.resume()
    assert [float(tensor[7]) for tensor in (shown, given, owned)] == [-1, -1, -1]
    loss.backward()
    assert pending.grad is not None
    assert pending.grad.sum() == 200_000


def test_a_resume_that_finds_no_memory_leaves_the_tensors_guarded(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(300, 300)
    before = weights(model)
    job = gpuslice.attach(model=model)
    job.suspend()
    with monkeypatch.context() as scarce:
        scarce.setattr("gpuslice.kernels.host.device.available_bytes", lambda: 0)
        with pytest.raises(DeviceMemoryError):
            job.resume()
    with pytest.raises(gpuslice.TensorParkedError):
        model.weight.sum()
    job.resume()
    assert weights(model) == before


def test_states_are_not_mixed_up(start: Start) -> None:
    job = gpuslice.attach(model=nn.Linear(2, 2))
    with pytest.raises(SuspendedStateError):
        job.resume()
    job.suspend()
    with pytest.raises(SuspendedStateError):
        job.suspend()
    with pytest.raises(UsageError, match="'gpu' is not a device"):
        job.resume(device="gpu")
    job.resume(device="cpu")


def test_nothing_is_moved_in_a_function_that_torch_transforms(start: Start) -> None:
    model = nn.Linear(2, 2)
    job = gpuslice.attach("night", model=model)

    def loss(x: torch.Tensor) -> torch.Tensor:
        result = model(x).sum()
        for call in (job.suspend, job.checkpoint):
            with pytest.raises(SuspendRefusedError, match="in a function that torch"):
                call()
        return result

    x = torch.ones(3, 2)
    assert torch.equal(torch.func.vmap(loss)(x), model(x).sum(1))
    torch.testing.assert_close(torch.func.grad(loss)(x), model.weight.detach().sum(0).expand(3, 2))
    with job.suspended():
        pass


def test_restore_loads_what_it_is_given(start: Start) -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    job = gpuslice.attach(model=model, best=1.5, log=[1, 2])
    path = job.suspend().path
    job.resume()
    expected = float(torch.rand(())), random.random()
    torch.manual_seed(5)
    random.seed(5)
    log: list[int] = []
    loaded = gpuslice.restore(path, model=other, best=None, log=log)
    assert weights(other) == weights(model)
    assert loaded["best"] == 1.5
    assert log == [1, 2]
    assert (float(torch.rand(())), random.random()) == expected
    with pytest.raises(RefusedSnapshotError, match="holds no 'optimizer'"):
        gpuslice.restore(path, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(RefusedSnapshotError, match="there is no snapshot"):
        gpuslice.restore(path.with_name("C.gsnp"), model=other)


def test_random_states_that_nobody_can_go_on_from_are_refused_before_anything_changes(start: Start) -> None:
    other = nn.Linear(3, 3)
    before = weights(other)
    job = gpuslice.attach(model=nn.Linear(3, 3))
    kind, keys, *rest = np.random.get_state()
    np.random.set_state((kind, keys, 625, *rest[1:]))  # NumPy takes it; nobody draws from it here
    path = job.suspend().path
    job.resume()
    np.random.seed(5)
    for restore in (lambda: gpuslice.restore(path, model=other), lambda: job.restore(path)):
        held = weights(job._objects["model"])
        with pytest.raises(RefusedSnapshotError, match="the process was saved with an impossible numpy"):
            restore()
        assert np.random.get_state()[2] <= 624
        assert (weights(other), weights(job._objects["model"])) == (before, held)


def test_a_snapshot_is_opened_once_to_go_on_from_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start("digits")
    job = gpuslice.attach(model=nn.Linear(3, 3))
    for _ in range(2):
        job.suspend()
        job.resume()
    start("digits")
    opened: list[Path] = []
    read_snapshot = reader.read_snapshot

    def counted(descriptor: int, path: Path) -> reader.SnapshotFile:
        opened.append(path)
        return read_snapshot(descriptor, path)

    monkeypatch.setattr(reader, "read_snapshot", counted)
    gpuslice.attach(model=nn.Linear(3, 3))
    assert len(opened) == len(set(opened)) >= 1


def test_a_named_job_goes_on_by_itself_and_an_unnamed_one_does_not(start: Start) -> None:
    saved = nn.Linear(3, 3)
    start("digits")
    job = gpuslice.attach(model=saved, best=9.0)
    job.state["best"] = 0.5
    job._runtime.boundaries.count = 7
    job.suspend()
    job.resume()
    expected = weights(saved)
    assert job._runtime.boundaries.went_on_from == 0

    start()
    unnamed = nn.Linear(3, 3)
    assert gpuslice.attach(model=unnamed, best=9.0).state["best"] == 9.0
    assert weights(unnamed) != expected

    start()
    by_script = nn.Linear(3, 3)
    by_name = gpuslice.attach("digits", model=by_script, best=9.0)
    assert by_name.state == {"best": 0.5}
    assert weights(by_script) == expected
    assert by_name._runtime.boundaries.went_on_from == by_name._runtime.boundaries.count == 7


def test_a_snapshot_that_does_not_fit_is_refused(start: Start) -> None:
    start("digits")
    job = gpuslice.attach(model=nn.Linear(3, 3))
    job.suspend()
    job.resume()
    start("digits")
    with pytest.raises(RefusedSnapshotError, match=r"model\.weight is float32 \(2, 2\) here"):
        gpuslice.attach(model=nn.Linear(2, 2))


def test_misuse_is_named(start: Start) -> None:
    with pytest.raises(UsageError, match=r"'gpuslice\.rng' is gpuslice's own"):
        gpuslice.attach(**{"gpuslice.rng": 1})
    with pytest.raises(UsageError, match="model is a function"):
        gpuslice.attach(model=weights)
    with pytest.raises(UsageError, match="not a job name"):
        gpuslice.attach("../evil", model=nn.Linear(1, 1))


def test_a_refused_attach_may_be_tried_again(start: Start) -> None:
    start("digits")
    job = gpuslice.attach(model=nn.Linear(3, 3))
    job.suspend()
    job.resume()
    start("digits")
    with pytest.raises(RefusedSnapshotError, match="holds 'model'"):
        gpuslice.attach(net=nn.Linear(3, 3))
    gpuslice.attach(model=nn.Linear(3, 3))
