"""Lazy resume: what comes later is never seen before it has come, whichever way one looks."""

from __future__ import annotations

import copy
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuslice.checkpoint.named import lazy_optimizer_state, process_rng
from gpuslice.checkpoint.named.lazy_optimizer_state import AwaitedSlots, LazyResume, Stream
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.background_snapshot import BackgroundSnapshot
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import CorruptSnapshotError, GpusliceError, RollbackError
from gpuslice.kernels.transfer import Checksums, Inspector, Pairs, Transfer

from ...patience import PATIENCE_S
from ..cases.registry import CASES, Loop
from ..harness import Broken, FaultyDevice, SpyGate, digest, disturb, seed
from ..test_matrix import marks, plain

JUNK = 0xA5


class Laggard(FaultyDevice):
    """What comes later is junk until somebody waits for it, and comes only then."""

    def __init__(self, **failures: int) -> None:
        super().__init__(**failures)
        self.begun = threading.Event()
        self.awaited = threading.Event()
        self.late = 0

    def reserve(self, pairs: Pairs) -> None:
        super().reserve(pairs)
        for storage, _ in pairs:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(JUNK)

    def copy_in(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        if threading.current_thread().name == "gpuslice-lazy":
            self.begun.set()
            assert self.awaited.wait(PATIENCE_S)
            self.awaited.clear()
            self.late += len(pairs)
        return super().copy_in(pairs, arena, inspect, checksums)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Laggard:
    found = Laggard()
    wait = Stream.wait

    def wait_noticed(stream: Stream) -> None:
        if not stream._over.is_set():
            found.awaited.set()
        wait(stream)

    monkeypatch.setattr(Stream, "wait", wait_noticed)
    return found


@pytest.fixture
def later() -> Iterator[LazyResume]:
    resume = LazyResume(smallest_bytes=1)
    yield resume
    resume.close()
    lazy_optimizer_state.await_all()


@pytest.fixture(scope="module")
def matrix_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobStore]:
    with RamDisk(tmp_path_factory.mktemp("lazy") / "ramdisk", 1 << 30).open_store(None) as opened:
        yield opened


def resumed_lazily(loop: Loop, switch: Switch) -> list[str]:
    """The digests of a run that is suspended at every boundary, and goes on at once after each resume."""
    seed(11)
    digests = []
    for boundary, state in enumerate(loop, start=1):
        digests.append(digest(process_rng.capture(), *state))
        switch.suspend(boundary=boundary)
        disturb()
        switch.resume()
    switch.settle()
    return digests


#: Of these something comes later; so that the test cannot pass by bringing back all at once.
LAZY = {"adam", "adamw-fused", "dropout", "gan", "sgd-foreach-momentum"}
#: Those that might well notice; the others are slow only because they are so many.
QUICK = {*LAZY, "accumulation", "moving_averages", "pending_graph", "truncated_backpropagation"}


def marked(name: str) -> object:
    """A case of the matrix as a parameter, with the marks it has there."""
    slow = [] if name in QUICK else [pytest.mark.slow]
    return pytest.param(name, marks=[*marks(name), *slow])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [marked(name) for name in sorted(CASES) if "compiled" not in name])
def test_the_matrix_survives(name: str, matrix_store: JobStore, device: Laggard, later: LazyResume) -> None:
    expected = plain(CASES[name]())
    assert resumed_lazily(CASES[name](), Switch(device, matrix_store, lazy=later)) == expected
    assert device.late or name not in LAZY


class Training:
    """A model, an Adam, and a way to see whether its moments are right without the optimizer."""

    def __init__(self) -> None:
        seed(3)
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 64)).square().mean().backward()
        self.optimizer.step()

    def moments(self) -> list[list[float]]:
        return [slots["exp_avg"].flatten().tolist() for slots in self.optimizer.state.values()]


@pytest.fixture
def training(later: LazyResume) -> Training:
    return Training()


def away_and_back(switch: Switch) -> int:
    """Suspend and resume; how many bytes come later."""
    switch.suspend(boundary=1)
    return switch.resume().bytes_later


def first_moment(state: Any) -> list[float]:
    values = next(iter(state.values())) if isinstance(state, dict) else state
    found: list[float] = values["exp_avg"].flatten().tolist()
    return found


def in_a_fork(optimizer: torch.optim.Optimizer) -> list[float]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(first_moment(optimizer.state)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    found: list[float] = json.loads(data)
    return found


def in_a_thread(optimizer: torch.optim.Optimizer) -> list[float]:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.extend(first_moment(optimizer.state)))
    thread.start()
    thread.join()
    return found


WAYS: dict[str, Callable[[torch.optim.Optimizer], list[float]]] = {
    "item": lambda optimizer: first_moment(optimizer.state),
    "items": lambda optimizer: (
        dict(next(iter(optimizer.state.values())).items())["exp_avg"].flatten().tolist()
    ),
    "dict": lambda optimizer: dict(next(iter(optimizer.state.values())))["exp_avg"].flatten().tolist(),
    "get": lambda optimizer: next(iter(optimizer.state.values())).get("exp_avg").flatten().tolist(),
    "unpacked": lambda optimizer: {**next(iter(optimizer.state.values()))}["exp_avg"].flatten().tolist(),
    "state_dict": lambda optimizer: first_moment(optimizer.state_dict()["state"]),
    "pickle": lambda optimizer: first_moment(pickle.loads(pickle.dumps(optimizer)).state),  # noqa: S301
    "deepcopy": lambda optimizer: first_moment(copy.deepcopy(optimizer).state),
    "copy": lambda optimizer: first_moment(copy.copy(optimizer).state),
    "fork": in_a_fork,
    "thread": in_a_thread,
}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_whoever_looks_waits(
    way: str, store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    expected = training.moments()[0]
    assert away_and_back(Switch(device, store, lazy=later)) > 0
    assert not device.late
    assert WAYS[way](training.optimizer) == expected
    assert device.late


def test_the_training_goes_on_before_it_has_come(
    store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    twin = Training()
    switch = Switch(device, store, lazy=later)
    switch.suspend(boundary=1)
    record = switch.resume()
    training.optimizer.zero_grad()
    training.model(torch.ones(1, 64)).square().mean().backward()
    assert not device.late
    training.optimizer.step()
    twin.step()
    assert training.moments() == twin.moments()
    assert (record.stream_s > 0, record.awaited_s > 0) == (True, True)
    parameters = [*training.model.parameters(), *twin.model.parameters()]
    assert record.bytes_later == sum(2 * parameter.nbytes + 4 for parameter in parameters)


class LastStep(SpyGate):
    """Sees whether what comes later is on its way while the resume is not over yet."""

    def __init__(self, device: Laggard) -> None:
        super().__init__()
        self.device = device
        self.begun_too_soon = False

    def open(self) -> None:
        self.begun_too_soon = self.device.begun.wait(0.2)


def test_it_comes_behind_the_resume_not_beside_it(
    store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    gate = LastStep(device)
    switch = Switch(device, store, gate=gate, lazy=later)
    assert away_and_back(switch) > 0
    assert not gate.begun_too_soon
    assert device.begun.wait(PATIENCE_S)
    switch.settle()


class Interrupted(SpyGate):
    """Ctrl-C at the end of a resume."""

    def open(self) -> None:
        raise KeyboardInterrupt


def test_it_comes_after_an_interruption_too(
    store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    expected = training.moments()
    switch = Switch(device, store, gate=Interrupted(), lazy=later)
    switch.suspend(boundary=1)
    with pytest.raises(KeyboardInterrupt):
        switch.resume()
    assert device.begun.wait(PATIENCE_S)
    assert training.moments() == expected


def test_nothing_stands_in_for_what_has_come(
    store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    before = [id(slots) for slots in training.optimizer.state.values()]
    switch = Switch(device, store, lazy=later)
    assert away_and_back(switch) > 0
    assert all(type(slots) is AwaitedSlots for slots in training.optimizer.state.values())
    switch.settle()
    assert [id(slots) for slots in training.optimizer.state.values()] == before
    assert not lazy_optimizer_state.under_way()


def test_the_next_suspend_waits(
    store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    expected = training.moments()
    switch = Switch(device, store, lazy=later)
    for _ in range(3):
        assert away_and_back(switch) > 0
    assert training.moments() == expected


def test_a_checkpoint_waits(disk: RamDisk, device: Laggard, later: LazyResume, training: Training) -> None:
    with disk.open_store("mine") as store:
        switch = Switch(device, store, lazy=later)
        assert away_and_back(switch) > 0
        named = {"model": training.model, "optimizer": training.optimizer}
        snapshot = BackgroundSnapshot(device, store, named, boundary=1)
        assert device.late
        assert snapshot.settle() is not None


def slots_of(training: Training) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = training.optimizer.state[training.model.weight]
    return found


#: What else may be over a matrix of the state; it keeps that matrix from coming later.
ALIASES: dict[str, Callable[[torch.Tensor], object]] = {
    "a view": lambda tensor: tensor[1:],
    "an alias": lambda tensor: tensor.detach(),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_memory_that_is_under_another_tensor_does_not_come_later(
    alias: str, store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    switch = Switch(device, store, lazy=later)
    held = ALIASES[alias](slots_of(training)["exp_avg"])
    without = away_and_back(switch)
    switch.settle()
    del held
    assert away_and_back(switch) == without + training.model.weight.nbytes


def test_nothing_comes_later_where_code_was_compiled(
    store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    function = torch.compile(lambda number: number + 1, backend="eager")
    function(torch.ones(1))
    assert away_and_back(Switch(device, store, lazy=later)) == 0
    torch._dynamo.reset()


def test_damage_to_what_comes_later_is_told_to_whoever_asks(
    store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    told: list[GpusliceError] = []
    gate = SpyGate()
    moment = bytes(slots_of(training)["exp_avg"].mul_(1.25).untyped_storage())  # like no other test's
    switch = Switch(device, store, gate=gate, lazy=later, lost=told.append)
    switch.suspend(boundary=1)
    assert switch.snapshot is not None
    damage(switch.snapshot.path, moment)
    assert switch.resume().bytes_later > 0
    for _ in range(2):
        with pytest.raises(RollbackError, match=r"is damaged"):
            training.optimizer.step()
    with pytest.raises(RollbackError):
        switch.suspend(boundary=2)
    assert gate.is_shut
    assert [type(error) for error in told] == [CorruptSnapshotError]
    lazy_optimizer_state._under_way[0].cancel()


def damage(path: Path, bytes_there: bytes) -> None:
    """Change one byte of the file where these lie."""
    place = path.read_bytes().index(bytes_there) + len(bytes_there) // 2
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([bytes_there[len(bytes_there) // 2] ^ 1]))


def test_a_resume_that_fails_at_once_can_be_tried_again(
    store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    expected = training.moments()
    switch = Switch(device, store, lazy=later)
    switch.suspend(boundary=1)
    device.failures["copy_in"] = 1
    with pytest.raises(Broken):
        switch.resume()
    assert not lazy_optimizer_state.under_way()
    assert switch.resume().bytes_later > 0
    assert training.moments() == expected
