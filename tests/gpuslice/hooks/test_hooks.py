"""The hooks on real DataLoaders and optimizers."""

from __future__ import annotations

import json
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
import torch.fx
import torch.utils.checkpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gpuslice.hooks.hooks import count_boundaries
from gpuslice.runtime.boundaries import EVALUATION_CALLS, BoundaryCounter, boundary
from gpuslice.runtime.ending import undisturbed

from ...patience import PATIENCE_S
from ..conftest import Workshop


@pytest.fixture
def counter() -> Iterator[BoundaryCounter]:
    counter = BoundaryCounter()
    hooks = count_boundaries(counter)
    yield counter
    hooks.remove()


def loader(**options: object) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2, **options)  # type: ignore[arg-type]


def test_every_fetch_counts_and_the_one_that_finds_the_end(counter: BoundaryCounter) -> None:
    batches = [batch for (batch,) in loader()]
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
    assert counter.count == 4


def test_the_boundary_comes_before_the_batch_is_fetched(counter: BoundaryCounter) -> None:
    seen: list[int] = []

    class Probe(Dataset[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            seen.append(counter.count)
            return index

    list(DataLoader(Probe()))
    assert seen == [1, 2]


def test_worker_processes_change_nothing(counter: BoundaryCounter) -> None:
    workers = loader(num_workers=1, persistent_workers=True)
    for _ in range(2):
        assert sum(1 for _ in workers) == 3
    assert counter.count == 8
    del workers


def in_thread(function: Callable[..., object], *arguments: object) -> None:
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


def test_boundaries_are_those_of_the_thread_that_fetches(counter: BoundaryCounter) -> None:
    in_thread(list, loader())
    assert counter.count == 4


def test_a_thread_that_fetches_for_one_that_trains_has_no_boundaries(counter: BoundaryCounter) -> None:
    net, x = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(x).sum().backward()
    optimizer.step()
    counted = counter.count
    in_thread(list, loader())
    assert counter.count == counted


def test_steps_of_two_threads_are_the_job_s_and_the_boundaries_those_of_one(counter: BoundaryCounter) -> None:
    net, x = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(x).sum().backward()
    optimizer.step()
    counted = counter.count
    in_thread(optimizer.step)
    assert (counter.steps, counter.count, counter.thread.ident) == (2, counted, threading.get_ident())


class Suspended:
    """A controller that holds back a signal at every boundary."""

    def __init__(self, counter: BoundaryCounter) -> None:
        counter.controller = self
        counter.stop_at = 1

    def at_boundary(self, boundary: int) -> list[int]:
        late: list[int] = []
        with undisturbed(late=late):
            signal.raise_signal(signal.SIGUSR1)
        return late


class Stop(Exception):
    """Raised by the script's signal handler."""


@pytest.fixture
def raising() -> Iterator[None]:
    def handler(signum: int, frame: FrameType | None) -> None:
        raise Stop

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("where", ["fetch", "step", "mark"])
def test_a_handler_that_waited_shows_no_frame_of_ours(
    counter: BoundaryCounter, raising: None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuslice.runtime.boundaries.counter", counter)
    batches = iter(loader())
    steps: dict[str, Callable[[], object]] = {
        "fetch": lambda: next(batches),
        "step": torch.optim.SGD([nn.Parameter(torch.ones(2))]).step,
        "mark": boundary,
    }
    Suspended(counter)

    def cross() -> None:
        steps[where]()
        while True:  # at the latest now Python looks for signals
            pass

    with pytest.raises(Stop) as info:
        cross()
    modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(info.value.__traceback__)]
    assert [name for name in modules if name.startswith("gpuslice.")] == []
    assert counter.count == 1


def test_a_dataset_s_exception_shows_no_frame_of_ours(counter: BoundaryCounter) -> None:
    class Bad(Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            raise ValueError("bad sample")

    with pytest.raises(ValueError, match="bad sample") as info:
        next(iter(DataLoader(Bad())))
    assert counter.count == 1
    frames = [frame.filename for frame in traceback.extract_tb(info.value.__traceback__)]
    assert not any(
        name.endswith(("gpuslice/hooks/hooks.py", "gpuslice/runtime/boundaries.py")) for name in frames
    )


def model() -> tuple[nn.Linear, torch.Tensor]:
    return nn.Linear(2, 1), torch.ones(4, 2)


def test_a_step_counts_once_though_a_subclass_calls_its_parent(counter: BoundaryCounter) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            super().step()

    net, x = model()
    torch.optim.SGD(net.parameters(), lr=0.1)  # its class is wrapped now: two hooks fire per step
    own = Own(net.parameters(), lr=0.1)
    net(x).sum().backward()
    own.step()
    own.step()
    assert counter.steps == 2


def test_a_step_that_fails_does_not_upset_the_count(counter: BoundaryCounter) -> None:
    net, x = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        optimizer.step(closure)  # type: ignore[arg-type]
    net(x).sum().backward()
    optimizer.step()
    assert counter.steps == 1


def test_lbfgs_steps_once_however_often_its_closure_runs(counter: BoundaryCounter) -> None:
    net, x = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5)

    def closure() -> float:
        optimizer.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    assert (counter.steps, counter.count) == (1, 1)


def test_an_optimizer_inside_backward_is_no_boundary(counter: BoundaryCounter) -> None:
    net, x = model()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    net(x).sum().backward()
    assert (counter.steps, counter.count) == (0, 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_steps_inside_a_compiled_function_are_not_traced(counter: BoundaryCounter) -> None:
    net, x = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    twin, _ = model()
    twin.load_state_dict(net.state_dict())
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        net(x).sum().backward()
        compiled()
        twin(x).sum().backward()
        twin_optimizer.step()
    assert torch.equal(net.weight, twin.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_steps_inside_a_compiled_function_are_counted(counter: BoundaryCounter) -> None:
    net, x = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in loader():
        net(x).sum().backward()
        compiled()
    assert (counter.steps, counter.count) == (3, 4)
    for _ in range(20):
        net(x).sum().backward()
        compiled()
    counter.settle_steps()
    assert counter.steps == 23
    assert counter.count > 4  # and they are boundaries, in a loop without a loader


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("error:.*Dynamo does not know:UserWarning")
def test_steps_inside_a_compiled_training_step_are_boundaries(counter: BoundaryCounter) -> None:
    net, x = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def train_step() -> None:
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    for _ in range(20):
        train_step()
    counter.settle_steps()
    assert counter.steps == 20
    assert counter.count >= 19  # each is noticed by the next one's backward pass


@pytest.fixture
def no_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has made none; this one may have."""
    monkeypatch.setattr("gpuslice.hooks.hooks._has_optimizer", lambda: False)


def descend(weight: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        weight.square().sum().backward()
        with torch.no_grad():
            assert weight.grad is not None
            weight -= 0.1 * weight.grad
            weight.grad = None


def test_a_loop_of_its_own_has_boundaries_at_backward(counter: BoundaryCounter, no_optimizer: None) -> None:
    descend(torch.ones(3, requires_grad=True), 4)
    weight = torch.ones(3, requires_grad=True)
    (slope,) = torch.autograd.grad(weight.square().sum(), weight, create_graph=True)
    torch.autograd.grad(slope.sum(), weight)
    assert (counter.count, counter.steps) == (6, 0)


def test_a_backward_pass_within_another_is_no_boundary(counter: BoundaryCounter, no_optimizer: None) -> None:
    weight = torch.ones(3, requires_grad=True)
    checkpoint = torch.utils.checkpoint.checkpoint
    checkpoint(lambda x: x.square().sum(), weight, use_reentrant=True).backward()
    assert counter.count == 1


def test_nothing_within_a_function_transform_is_a_boundary(
    counter: BoundaryCounter, no_optimizer: None
) -> None:
    """There every tensor is a wrapper without memory, and nothing can be swept or suspended."""
    model, inputs = nn.Linear(2, 2), torch.ones(3, 2)
    torch.func.grad(lambda x: x.square().sum())(inputs)
    torch.func.jacrev(torch.square)(inputs)
    with torch.no_grad():
        for _ in range(EVALUATION_CALLS + 1):
            torch.func.vmap(model)(inputs)
    assert counter.count == 0
    model(inputs).sum().backward()
    assert counter.count == 1


def test_a_backward_pass_that_fails_is_no_boundary_and_shows_no_frame_of_ours(
    counter: BoundaryCounter, no_optimizer: None
) -> None:
    loss = torch.ones(3, requires_grad=True).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time") as info:
        loss.backward()
    assert counter.count == 1
    frames = traceback.extract_tb(info.value.__traceback__)
    assert [frame.filename for frame in frames if "gpuslice" in frame.filename] == [__file__]
    assert "run_backward" in str(frames[-1].line)


def test_backward_passes_amid_the_handling_of_an_error_are_boundaries(
    counter: BoundaryCounter, no_optimizer: None
) -> None:
    """As of a loop that is run again with smaller batches, where the first attempt ran out of memory."""
    loss = torch.ones(3, requires_grad=True).square().sum()
    loss.backward()
    try:
        loss.backward()
    except RuntimeError:
        descend(torch.ones(3, requires_grad=True), 2)
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
    assert counter.count == 3


def test_backward_passes_are_boundaries_in_whichever_thread_they_run(
    counter: BoundaryCounter, no_optimizer: None
) -> None:
    in_thread(descend, torch.ones(3, requires_grad=True), 2)
    assert counter.count == 2


def test_an_optimizer_that_has_not_stepped_yet_is_waited_for(counter: BoundaryCounter) -> None:
    net, x = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(x).sum().backward()
        net(x).sum().backward()
        optimizer.step()
    assert (counter.count, counter.steps) == (3, 3)


class Twice(nn.Module):
    """A model of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


@pytest.mark.parametrize("kind", [Twice, lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))])
def test_where_nothing_else_is_calls_of_the_model_are_boundaries(
    counter: BoundaryCounter, kind: Callable[[], nn.Module]
) -> None:
    model = kind()
    call = type(model).__call__
    with torch.no_grad():
        for _ in range(EVALUATION_CALLS + 4):
            model(torch.ones(1, 2))
        assert counter.count == 4
        list(loader())
        before = counter.count
        for _ in range(EVALUATION_CALLS + 4):
            model(torch.ones(1, 2))
        assert counter.count == before
        assert "__call__" not in vars(type(model))  # nobody pays for it any more
        model.eval()
        for _ in range(EVALUATION_CALLS + 4):
            model(torch.ones(1, 2))
        assert counter.count == before + 4
    assert type(model).__call__ is call


def test_evaluation_is_watched_though_torch_fx_has_traced(counter: BoundaryCounter) -> None:
    model = Twice()
    torch.fx.symbolic_trace(model)
    model.eval()
    with torch.no_grad():
        for _ in range(EVALUATION_CALLS + 4):
            model(torch.ones(1, 2))
    assert counter.count == 4


def test_torch_fx_traces_the_same_graph_while_a_class_of_modules_is_watched(counter: BoundaryCounter) -> None:
    def operations() -> list[str]:
        return [node.op for node in torch.fx.symbolic_trace(Twice()).graph.nodes]

    linear, call = nn.Linear(2, 2), nn.Linear.__call__
    with torch.no_grad():
        for _ in range(EVALUATION_CALLS + 1):
            linear(torch.ones(1, 2))
    assert "__call__" in vars(nn.Linear)
    assert operations() == ["placeholder", "call_module", "call_module", "output"]
    before = counter.count
    with torch.no_grad():
        linear(torch.ones(1, 2))
    assert counter.count == before + 1
    assert nn.Linear.__call__ is call


def test_calls_that_an_optimizer_s_step_follows_are_no_boundaries(counter: BoundaryCounter) -> None:
    net, x = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sum(net(x).sum() for _ in range(EVALUATION_CALLS + 4)).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert (counter.count, counter.steps) == (1, 1)


CHILDREN = f"""
import json, multiprocessing, os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

def loop():
    return sum(1 for _ in DataLoader(TensorDataset(torch.arange(6)), batch_size=2))

def asked():
    from gpuslice.runtime.boundaries import counter
    return type(counter.controller).__name__ == "Drill"  # not what waits for a child to train

def spawned(queue):
    queue.put([asked(), loop()])

if __name__ == "__main__":
    pid = os.fork()
    if pid == 0:
        loop()
        sys.exit(5)  # runs the exit handlers it has inherited
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=spawned, args=(queue,))
    process.start()
    answer = queue.get(timeout={PATIENCE_S})
    process.join()
    loop()
    print(json.dumps([code, answer, asked()]))
"""


@pytest.mark.slow
def test_only_the_training_process_suspends(quick_workshop: Workshop) -> None:
    quick_workshop.write("children.py", CHILDREN)
    done = quick_workshop.gpuslice_run("--suspend-every", "1", "--report", "r.json", "children.py")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [5, [False, 3], True]
    report = json.loads((quick_workshop.directory / "r.json").read_text())
    assert [switch["boundary"] for switch in report["switches"]] == [1, 2, 3, 4]
    assert done.stderr.count("gpuslice: ") == 1
