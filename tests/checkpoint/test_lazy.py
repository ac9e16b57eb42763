"""Lazy resume: what comes later is never seen before it has come, whichever way one looks."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuslice.checkpoint import lazy, rng
from gpuslice.checkpoint.background import BackgroundSnapshot
from gpuslice.checkpoint.lazy import LazyResume, Stream
from gpuslice.checkpoint.ramdisk import RamDisk
from gpuslice.checkpoint.store import JobStore
from gpuslice.checkpoint.switch import Switch
from gpuslice.errors import CorruptSnapshotError, GpusliceError, RollbackError
from gpuslice.kernels.copying import Inspector, Pairs
from gpuslice.kernels.transfer import Transfer

from .cases.registry import CASES, Loop
from .harness import Broken, FaultyDevice, SpyGate, digest, disturb, seed
from .test_matrix import marks, plain

#: Far more than anything here takes.
PATIENCE_S = 60.0
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

    def copy_in(self, pairs: Pairs, arena: memoryview, inspect: Inspector | None = None) -> Transfer:
        if threading.current_thread().name == "gpuslice-lazy":
            self.begun.set()
            assert self.awaited.wait(PATIENCE_S)
            self.awaited.clear()
            self.late += len(pairs)
        return super().copy_in(pairs, arena, inspect)


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


class Witness(LazyResume):
    """Counts how many times it finds out what may come later."""

    looked = 0

    def _later(self, away: lazy.Away) -> dict[int, int]:
        self.looked += 1
        return super()._later(away)


@pytest.fixture
def later() -> Iterator[Witness]:
    resume = Witness(smallest_bytes=1)
    yield resume
    resume.close()
    lazy.await_all()


@pytest.fixture(scope="module")
def matrix_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobStore]:
    with RamDisk(tmp_path_factory.mktemp("lazy") / "ramdisk", 1 << 30).open_store(None) as opened:
        yield opened


def resumed_lazily(loop: Loop, switch: Switch) -> list[str]:
    """The digests of a run that is suspended at every boundary, and goes on at once after each resume."""
    seed(11)
    digests = []
    for boundary, state in enumerate(loop, start=1):
        digests.append(digest(rng.capture(), *state))
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


def bar_is_there() -> bool:
    return "__getattribute__" in vars(torch.optim.Optimizer)


def away_and_back(switch: Switch) -> int:
    """Suspend and resume; how many bytes come later."""
    switch.suspend(boundary=1)
    return switch.resume().bytes_later


def first_moment(state: Any) -> list[float]:
    values = next(iter(state.values())) if isinstance(state, dict) else state
    found: list[float] = values["exp_avg"].flatten().tolist()
    return found


def by_the_collector(optimizer: torch.optim.Optimizer) -> list[float]:
    gc.collect()
    for item in gc.get_objects():
        if type(item) is dict and "exp_avg" in item and tuple(item["exp_avg"].shape) == (64, 64):
            return first_moment({0: item})
    raise AssertionError("the collector does not show it")


def in_a_fork(optimizer: torch.optim.Optimizer) -> list[float]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        # Past every bar, as in a process that has never known of any.
        state = object.__getattribute__(optimizer, "__dict__")["state"]
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(first_moment(state)).encode())
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


def compiled(optimizer: torch.optim.Optimizer) -> list[float]:
    """Compiling anything is enough: what it makes of an optimizer asks nobody."""
    torch.compile(lambda number: number + 1, backend="eager")(torch.ones(1))
    torch._dynamo.reset()
    return first_moment(object.__getattribute__(optimizer, "__dict__")["state"])


WAYS: dict[str, Callable[[torch.optim.Optimizer], list[float]]] = {
    "attribute": lambda optimizer: first_moment(optimizer.state),
    "getattr": lambda optimizer: first_moment(getattr(optimizer, "".join(["st", "ate"]))),
    "vars": lambda optimizer: first_moment(vars(optimizer)["state"]),
    "state_dict": lambda optimizer: first_moment(optimizer.state_dict()["state"]),
    "pickle": lambda optimizer: first_moment(pickle.loads(pickle.dumps(optimizer)).state),  # noqa: S301
    "deepcopy": lambda optimizer: first_moment(copy.deepcopy(optimizer).state),
    "copy": lambda optimizer: first_moment(copy.copy(optimizer).state),
    "collector": by_the_collector,
    "fork": in_a_fork,
    "thread": in_a_thread,
    "compile": compiled,
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


def test_the_bar_is_gone_when_all_has_come(
    store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    capture = torch.cuda.CUDAGraph.capture_begin
    switch = Switch(device, store, lazy=later)
    assert away_and_back(switch) > 0
    assert bar_is_there()
    switch.settle()
    assert not bar_is_there()
    assert torch.cuda.CUDAGraph.capture_begin is capture


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


class Keeper(torch.optim.Adam):
    """Gives away its state under a name that nobody watches."""

    @property
    def state(self) -> Any:
        return self.__dict__["hidden"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["hidden"] = value


def slots_of(training: Training) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = training.optimizer.state[training.model.weight]
    return found


HOLDERS: dict[str, Callable[[Training], object]] = {
    "the state": lambda training: training.optimizer.state,
    "the attributes": lambda training: vars(training.optimizer),
    "an iterator": lambda training: iter(training.optimizer.state.items()),
}
#: These keep only one matrix from coming later.
HOLDERS_OF_ONE: dict[str, Callable[[Training], object]] = {
    "the tensor": lambda training: slots_of(training)["exp_avg"],
    "a view": lambda training: slots_of(training)["exp_avg"][1:],
    "its storage": lambda training: slots_of(training)["exp_avg"].untyped_storage(),
    "an alias": lambda training: slots_of(training)["exp_avg"].detach(),
    "a weak reference": lambda training: weakref.ref(slots_of(training)["exp_avg"]),
    "a capsule": lambda training: torch.utils.dlpack.to_dlpack(slots_of(training)["exp_avg"]),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_state_that_somebody_holds_does_not_come_later(
    holder: str, store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    held = HOLDERS[holder](training)
    assert away_and_back(Switch(device, store, lazy=later)) == 0
    del held


@pytest.mark.parametrize("holder", HOLDERS_OF_ONE)
@pytest.mark.parametrize("swept", [False, True], ids=["new", "seen before"])
def test_a_tensor_that_somebody_holds_does_not_come_later(
    holder: str, swept: bool, store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    switch = Switch(device, store, lazy=later)
    if swept:
        away_and_back(switch)
    held = HOLDERS_OF_ONE[holder](training)
    without = away_and_back(switch)
    switch.settle()
    del held
    assert away_and_back(switch) == without + training.model.weight.nbytes


def test_the_state_of_one_who_holds_a_parameter_s_slots_does_not_come_later(
    store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    switch = Switch(device, store, lazy=later)
    held = slots_of(training)
    without = away_and_back(switch)
    assert held
    del held
    assert away_and_back(switch) == without + 2 * training.model.weight.nbytes + 4


def test_state_with_two_owners_does_not_come_later(
    store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    other = torch.optim.Adam(training.model.parameters())
    other.state = training.optimizer.state
    training.step()
    assert away_and_back(Switch(device, store, lazy=later)) == 0


def test_an_optimizer_with_ways_of_its_own_is_left_alone(
    store: JobStore, device: Laggard, later: LazyResume
) -> None:
    model = torch.nn.Linear(64, 64)
    keeper = Keeper(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    keeper.step()
    assert keeper.state
    assert away_and_back(Switch(device, store, lazy=later)) == 0


def test_nothing_comes_later_where_code_was_compiled(
    store: JobStore, device: Laggard, later: LazyResume, training: Training
) -> None:
    function = torch.compile(lambda number: number + 1, backend="eager")
    function(torch.ones(1))
    assert away_and_back(Switch(device, store, lazy=later)) == 0
    torch._dynamo.reset()


def test_what_was_foreseen_is_not_found_out_again(
    store: JobStore, device: Laggard, later: Witness, training: Training
) -> None:
    expected = training.moments()
    switch = Switch(device, store, lazy=later)
    switch.foresee()
    assert (later.looked, bar_is_there()) == (0, False), "it is not suspended"
    without = away_and_back(switch)
    for _ in range(2):
        switch.suspend(boundary=1)
        switch.foresee()
        looked = later.looked
        assert bar_is_there()
        assert switch.resume().bytes_later == without > 0
        assert later.looked == looked
    assert training.moments() == expected
    assert not bar_is_there()


#: Of a tensor without memory there is no view.
WHILE_PARKED = {way: hold for way, hold in (HOLDERS | HOLDERS_OF_ONE).items() if way != "a view"}


@pytest.mark.parametrize("holder", WHILE_PARKED)
def test_nothing_foreseen_holds_when_somebody_has_taken_hold_since(
    holder: str, store: JobStore, device: Laggard, later: Witness, training: Training
) -> None:
    switch = Switch(device, store, lazy=later)
    without = away_and_back(switch)
    switch.suspend(boundary=2)
    switch.foresee()
    held = WHILE_PARKED[holder](training)
    lost = without if holder in HOLDERS else training.model.weight.nbytes
    assert switch.resume().bytes_later == without - lost
    del held


#: Other ways to come upon the state, how many times it is found out again after them, and whether anything
#: comes later then.
OTHER_WAYS: dict[str, tuple[Callable[[], object], int, bool]] = {
    "collector": (
        lambda: [item for item in gc.get_objects() if type(item) is torch.UntypedStorage],
        1,
        False,
    ),
    "fork": (lambda: os.waitpid(os.fork() or os._exit(0), 0), 1, True),
    "compiler": (lambda: torch.compile(lambda number: number + 1, backend="eager")(torch.ones(1)), 0, False),
}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_nothing_foreseen_holds_when_it_could_be_come_upon_otherwise(
    way: str, store: JobStore, device: Laggard, later: Witness, training: Training
) -> None:
    switch = Switch(device, store, lazy=later)
    switch.suspend(boundary=1)
    switch.foresee()
    looked = later.looked
    come_upon, again, comes_later = OTHER_WAYS[way]
    seen = come_upon()
    bytes_later = switch.resume().bytes_later
    torch._dynamo.reset()
    assert (later.looked - looked, bytes_later > 0) == (again, comes_later)
    del seen


def test_nothing_foreseen_holds_when_the_state_got_a_way_of_its_own(
    store: JobStore, device: Laggard, later: Witness, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = Switch(device, store, lazy=later)
    switch.suspend(boundary=1)
    switch.foresee()
    monkeypatch.setattr(torch.optim.Adam, "state", property(lambda adam: None), raising=False)
    assert switch.resume().bytes_later == 0


def test_a_bar_of_somebody_else_s_is_left_where_it_is(
    store: JobStore, device: Laggard, later: Witness, training: Training
) -> None:
    switch = Switch(device, store, lazy=later)
    switch.suspend(boundary=1)
    switch.foresee()
    type.__setattr__(torch.optim.Optimizer, "__getattribute__", object.__getattribute__)
    assert switch.resume().bytes_later == 0
    assert bar_is_there()
    type.__delattr__(torch.optim.Optimizer, "__getattribute__")


class Nothing:
    """Another state that is away."""

    storages = ()

    def freed(self, at_least_bytes: int) -> dict[int, int]:
        return {}


def test_what_was_foreseen_of_another_state_does_not_hold(
    store: JobStore, device: Laggard, later: Witness, training: Training
) -> None:
    switch = Switch(device, store, lazy=later)
    switch.suspend(boundary=1)
    later.foresee(Nothing())
    assert switch.resume().bytes_later > 0


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
    lazy._under_way[0].cancel()


def damage(path: Path, bytes_there: bytes) -> None:
    """Change one byte of the file where these lie."""
    place = path.read_bytes().index(bytes_there) + len(bytes_there) // 2
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([bytes_there[len(bytes_there) // 2] ^ 1]))


@pytest.mark.parametrize("foreseen", [False, True])
def test_a_resume_that_fails_at_once_can_be_tried_again(
    store: JobStore, device: Laggard, later: LazyResume, training: Training, foreseen: bool
) -> None:
    expected = training.moments()
    switch = Switch(device, store, lazy=later)
    switch.suspend(boundary=1)
    if foreseen:
        switch.foresee()
    device.failures["copy_in"] = 1
    with pytest.raises(Broken):
        switch.resume()
    assert not bar_is_there()
    assert switch.resume().bytes_later > 0
    assert training.moments() == expected
