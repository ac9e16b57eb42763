"""The gate for other threads: stopped at the edge of torch, or named."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile

from gpuslice.errors import SuspendRefusedError
from gpuslice.runtime.threads.thread_gate import ThreadGate

from ....patience import PATIENCE_S
from ...conftest import Workshop


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadGate]:
    gate = ThreadGate()
    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", threading.Thread._bootstrap_inner)  # type: ignore[attr-defined]
    gate.install()
    yield gate
    gate.open()


@pytest.fixture(autouse=True)
def only_the_test_s_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of whatever runs the tests are no threads of a job."""
    found, mine = sys._current_frames, threading.get_ident()
    before = found().keys() - {mine}
    monkeypatch.setattr(
        sys,
        "_current_frames",
        lambda: {ident: frame for ident, frame in found().items() if ident not in before},
    )


@pytest.fixture
def workshop(warm_workshop: Workshop) -> Workshop:
    return warm_workshop


@contextmanager
def running(body: Callable[[], None], name: str = "worker") -> Iterator[threading.Thread]:
    thread = threading.Thread(target=body, name=name)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


class Updater:
    """Works on a tensor in a loop and says how far it is."""

    def __init__(self) -> None:
        self.ema = torch.zeros(8)
        self.rounds = 0
        self.moved = threading.Event()
        self.stop = threading.Event()

    def __call__(self) -> None:
        while not self.stop.is_set():
            self.ema.add_(1)
            self.rounds += 1
            self.moved.set()

    def moves(self, within_s: float = PATIENCE_S) -> bool:
        self.moved.clear()
        return self.moved.wait(within_s)


def test_a_background_thread_stops_and_goes_on(gate: ThreadGate) -> None:
    updater = Updater()
    with running(updater):
        for _ in range(3):
            assert updater.moves()
            gate.close()
            held = updater.ema.clone()
            for _ in range(2):  # the first may be a round that was finished when the gate closed
                updater.moves(0.05)
            assert torch.equal(updater.ema, held)
            gate.open()
        assert updater.moves()
        updater.stop.set()
    assert updater.ema[0] == updater.rounds


def test_a_thread_ends_at_the_edge_of_a_lost_state(gate: ThreadGate, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[threading.ExceptHookArgs] = []  # pytest's own hook takes even a SystemExit for a failure
    monkeypatch.setattr(threading, "excepthook", ended.append)
    updater = Updater()
    with running(updater) as thread:
        assert updater.moves()
        gate.close()
        gate.shut()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    gate.open()
    with running(updater) as late:
        late.join(PATIENCE_S)
    assert updater.ema[0] == updater.rounds
    assert [one.exc_type for one in ended] == [SystemExit, SystemExit]


def test_a_thread_that_only_holds_tensors_is_no_obstacle(gate: ThreadGate) -> None:
    release, held = threading.Event(), []
    ready = threading.Event()

    def hold() -> None:
        held.append(torch.ones(4))
        ready.set()
        release.wait(PATIENCE_S)

    with running(hold):
        assert ready.wait(PATIENCE_S)
        gate.close()
        assert not gate.alone
        gate.open()
        release.set()
    assert gate.alone


class SlowFile(io.BytesIO):
    """A file whose first write waits until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.writing = threading.Event()
        self.go_on = threading.Event()

    def write(self, data: object) -> int:
        self.writing.set()
        self.go_on.wait(PATIENCE_S)
        return super().write(data)  # type: ignore[arg-type]


def test_a_suspend_is_refused_by_name_while_a_thread_saves(gate: ThreadGate) -> None:
    gate._patience_s = 0.05
    file = SlowFile()
    with running(lambda: torch.save({"w": torch.ones(4)}, file), name="checkpoint-writer"):
        assert file.writing.wait(PATIENCE_S)
        with pytest.raises(SuspendRefusedError, match=r"'checkpoint-writer'.*torch.serialization"):
            gate.close()
        file.go_on.set()
    gate.close()
    gate.open()


def test_closing_waits_for_a_thread_to_leave_torch(gate: ThreadGate) -> None:
    file = SlowFile()
    with running(lambda: torch.save({"w": torch.ones(4)}, file)):
        assert file.writing.wait(PATIENCE_S)
        closer = threading.Timer(0.05, file.go_on.set)
        closer.start()
        gate.close()
        gate.open()
        closer.join()
    file.seek(0)
    assert torch.equal(torch.load(file)["w"], torch.ones(4))


def test_a_thread_older_than_the_gate_is_refused_by_name_if_its_code_knows_torch() -> None:
    gate, release, ready = ThreadGate(), threading.Event(), threading.Event()

    def heartbeat() -> None:  # it touches no tensor now, but this module has imported torch
        ready.set()
        release.wait(PATIENCE_S)

    with running(heartbeat, name="heartbeat"):
        assert ready.wait(PATIENCE_S)
        with pytest.raises(SuspendRefusedError, match=r"'heartbeat'.*import torch"):
            gate.close()
        release.set()
    gate.close()
    gate.open()


def test_an_older_thread_that_knows_nothing_of_torch_is_no_obstacle() -> None:
    gate, release, ready = ThreadGate(), threading.Event(), threading.Event()
    below: dict[str, object] = {"__name__": "logs", "ready": ready, "release": release, "sys": sys}
    exec(f"def work(): ready.set(); release.wait({PATIENCE_S})", below)  # noqa: S102 - a module without torch
    with running(below["work"], name="logs"):  # type: ignore[arg-type]
        assert ready.wait(PATIENCE_S)
        gate.close()
        gate.open()
        release.set()


def test_our_own_threads_pass(gate: ThreadGate) -> None:
    results: list[torch.Tensor] = []
    gate.close()
    with running(lambda: results.append(torch.ones(2) + 1), name="gpuslice-copy"):
        pass
    assert results[0].tolist() == [2, 2]
    assert gate.alone


def test_a_thread_s_exception_shows_no_frame_of_ours(
    gate: ThreadGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", caught.append)

    def fail() -> None:
        raise ValueError("user's own")

    with running(fail):
        pass
    trace, files = caught[0].exc_traceback, []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    assert not any(file.endswith("gpuslice/runtime/threads/thread_gate.py") for file in files)


def test_a_pin_memory_thread_is_known_to_be_harmless(gate: ThreadGate) -> None:
    """A thread below torch's pin-memory loop that waits for work, as it does between two batches."""
    release, ready = threading.Event(), threading.Event()
    below: dict[str, object] = {"__name__": "torch.utils.data._utils.pin_memory"}
    exec("def loop(wait): wait()", below)  # noqa: S102 - makes a frame of that module

    def wait() -> None:
        ready.set()
        release.wait(PATIENCE_S)

    with running(lambda: below["loop"](wait)):  # type: ignore[operator]
        assert ready.wait(PATIENCE_S)
        gate.close()
        assert gate.alone
        gate.open()
        release.set()


def test_the_threads_of_torch_compile_are_known_to_be_harmless(gate: ThreadGate) -> None:
    AsyncCompile.pool().submit(int).result(PATIENCE_S)
    with ThreadPoolExecutor(1) as other:
        assert gate.alone
        other.submit(int).result(PATIENCE_S)
        assert not gate.alone
    assert gate.alone


#: An updater that is older than torch, and one that no gate can stop.
EARLY = """
import _thread, queue, sys, threading
work, done = queue.Queue(), queue.Queue()
def updater():
    while update := work.get():
        update()
        done.put(True)
{start}
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Linear(64, 64)
ema = torch.zeros(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def update():
    for _ in range(20):
        ema.mul_(0.9).add_(model.weight.detach(), alpha=0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 64)), batch_size=4)
for (x,) in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    work.put(update)
    if {lockstep}:
        done.get()
work.put(None)
{join}
print(ema.double().sum().item())
"""


def test_threads_that_are_older_than_torch_stop_at_the_gate_too(workshop: Workshop) -> None:
    """Each round of the updater races with the suspend at the next boundary, after the step it waits for."""
    start = "thread = threading.Thread(target=updater)\nthread.start()"
    workshop.write("early.py", EARLY.format(start=start, lockstep=True, join="thread.join()"))
    plain = workshop.python("early.py")
    ours = workshop.gpuslice_run("--suspend-every", "1", "early.py")
    assert (ours.returncode, ours.stdout) == (0, plain.stdout), ours.stderr
    assert "9 switches" in ours.stderr
    workshop.write("early.py", EARLY.format(start=start, lockstep=False, join="thread.join()"))
    racing = workshop.gpuslice_run("--suspend-every", "1", "early.py")
    assert racing.returncode == 0, racing.stderr  # neither a crash nor a deadlock


def test_a_thread_that_no_gate_stops_is_refused_by_name(workshop: Workshop) -> None:
    start = "_thread.start_new_thread(updater, ())"
    workshop.write("early.py", EARLY.format(start=start, lockstep=True, join=""))
    done = workshop.gpuslice_run("--suspend-at", "3", "early.py")
    assert (done.returncode, done.stdout) == (3, "")
    assert "may use torch at any time" in done.stderr


def test_a_thread_that_stands_still_is_no_obstacle(gate: ThreadGate) -> None:
    """It stands within torch: a DataLoader's ``__next__`` has called the hook in which it does."""
    standing, done = threading.Event(), threading.Event()

    def stand(*arguments: object) -> torch.Tensor:
        with gate.standing():
            standing.set()
            done.wait(PATIENCE_S)
        return torch.ones(1)

    with running(lambda: torch.utils._pytree.tree_map(stand, [1])):
        standing.wait(PATIENCE_S)
        gate.close()
        assert gate.alone
        gate.open()
        done.set()
