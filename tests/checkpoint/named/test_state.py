"""Named state: everything that can be attached comes back bit for bit into other objects."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpuslice.checkpoint.named.state import check
from gpuslice.checkpoint.ramdisk.store import JobStore

from ..named_state import Net, bits, module_bits, reload, save


def test_module(store: JobStore) -> None:
    saved, live = Net(7), Net(0)
    saved(torch.randn(5, 4)).sum().backward()
    saved.frozen.eval()
    assert module_bits(saved) != module_bits(live)
    reload(store, {"model": saved}, {"model": live})
    assert module_bits(saved) == module_bits(live)
    assert live.calls == 7
    assert live.tied.weight is live.first.weight


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_has_the_names_of_the_plain_one(store: JobStore) -> None:
    saved, live = Net(7), Net(0)
    reload(store, {"model": torch.compile(saved)}, {"model": live})
    assert module_bits(saved) == module_bits(live)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "lbfgs wolfe": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        x = torch.randn(5, 4, generator=generator).to(dtype)
        optimizer.step(closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_go_on_as_if_nothing_had_happened(store: JobStore, name: str) -> None:
    saved, live = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(2))
    theirs, ours = (OPTIMIZERS[name](list(model.parameters())) for model in (saved, live))
    train(saved, theirs, 3, seed=1)
    theirs.param_groups[0]["lr"] *= 0.5
    reload(store, {"m": saved, "o": theirs}, {"m": live, "o": ours})
    train(saved, theirs, 3, seed=2)
    train(live, ours, 3, seed=2)
    assert module_bits(saved) == module_bits(live)


def test_sparse_adam_with_a_kept_sparse_gradient(store: JobStore) -> None:
    saved, live = (nn.Embedding(6, 3, sparse=True) for _ in range(2))
    theirs, ours = (torch.optim.SparseAdam(model.parameters()) for model in (saved, live))

    def step(model: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
        model(torch.tensor([1, 4, 1])).sum().backward()
        optimizer.step()

    step(saved, theirs)
    reload(store, {"m": saved, "o": theirs}, {"m": live, "o": ours})
    for model, optimizer in ((saved, theirs), (live, ours)):
        step(model, optimizer)
    assert bits(saved.weight) == bits(live.weight)
    assert torch.equal(saved.weight.grad.to_dense(), live.weight.grad.to_dense())


def test_moments_keep_their_dtype_beside_low_precision_parameters(store: JobStore) -> None:
    saved, live = (nn.Linear(4, 1).bfloat16() for _ in range(2))
    theirs, ours = (torch.optim.AdamW(model.parameters()) for model in (saved, live))
    train(saved, theirs, 1, seed=1)
    theirs.state[saved.weight]["exp_avg"] = torch.full((1, 4), 1 / 3, dtype=torch.float32)
    reload(store, {"m": saved, "o": theirs}, {"m": live, "o": ours})
    assert torch.equal(ours.state[live.weight]["exp_avg"], theirs.state[saved.weight]["exp_avg"])
    assert ours.state[live.weight]["exp_avg"].dtype is torch.float32


def test_frozen_parameters_have_no_optimizer_state(store: JobStore) -> None:
    saved, live = Net(7), Net(0)
    theirs, ours = (torch.optim.Adam(model.parameters()) for model in (saved, live))
    train(saved, theirs, 1, seed=1)
    train(live, ours, 2, seed=2)
    reload(store, {"m": saved, "o": theirs}, {"m": live, "o": ours})
    assert live.frozen.weight not in ours.state
    assert len(ours.state) == len(theirs.state)
    train(saved, theirs, 2, seed=3)
    train(live, ours, 2, seed=3)
    assert module_bits(saved) == module_bits(live)


def tensors() -> dict[str, torch.Tensor]:
    """Every dtype and every odd layout."""
    torch.manual_seed(1)
    floats = torch.randn(6, 8)
    dtypes = (
        *(torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
        *(torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    )
    named = {str(dtype): (floats * 9).to(dtype) for dtype in dtypes}
    return named | {
        "complex32": torch.view_as_complex(torch.randn(3, 2, dtype=torch.float16)),
        "nan payload": torch.tensor([0x7FC12345, -1], dtype=torch.int32).view(torch.float32),
        "transposed": floats.t(),
        "strided": floats[::2, 1::3],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "coo": torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse(),
        "csr": torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse_csr(),
    }


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:ComplexHalf:UserWarning")
def test_tensors_of_every_kind(store: JobStore) -> None:
    saved = tensors()
    live = {name: torch.zeros_like(t) for name, t in saved.items() if t.layout is torch.strided}
    live["expanded"] = torch.zeros(3, 1).expand(3, 4)
    live |= {name: saved[name] * 3 for name in ("coo", "csr")}
    addresses = {name: t.data_ptr() for name, t in live.items() if t.layout is torch.strided}
    reload(store, saved, live)
    for name, tensor in saved.items():
        plain, other = (t.to_dense() if t.layout is not torch.strided else t for t in (tensor, live[name]))
        assert bits(plain) == bits(other), name
    assert addresses == {name: t.data_ptr() for name, t in live.items() if t.layout is torch.strided}


@pytest.mark.skipif(not hasattr(torch, "quantize_per_tensor"), reason="this torch has no quantized tensors")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_tensors(store: JobStore) -> None:
    def make(factor: float) -> dict[str, object]:
        values = torch.arange(6.0).reshape(2, 3) * factor
        scales, zeros = torch.tensor([0.1, 0.2]) * factor, torch.tensor([0, 1])
        return {
            "tensor": torch.quantize_per_tensor(values, 0.1 * factor, 3, torch.quint8),
            "channel": torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8),
        }

    saved, live = make(1.0), make(2.0)
    reload(store, saved, live)
    assert all(torch.equal(saved[name].dequantize(), live[name].dequantize()) for name in saved)  # type: ignore[attr-defined]


def test_tensors_that_shared_memory_share_it_again(store: JobStore) -> None:
    base = torch.arange(8.0)
    saved = {"state": {"all": base, "part": base[2:5], "same": base}}
    state = reload(store, saved, {"state": {}})["state"]
    state["part"][0] = 70.0
    assert state["all"][2] == 70.0
    assert state["same"].data_ptr() == state["all"].data_ptr()


GENERATORS: dict[str, Callable[[int], Any]] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "pcg": lambda seed: np.random.default_rng(seed),
    "philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "mt": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "legacy": lambda seed: np.random.RandomState(seed),
    "random": lambda seed: random.Random(seed),
}


def draw(generator: Any) -> object:
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(3)]
    return generator.standard_normal(3).tolist()


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_go_on(store: JobStore, name: str) -> None:
    saved, live = GENERATORS[name](1), GENERATORS[name](2)
    draw(saved)
    reload(store, {"generator": saved}, {"generator": live})
    assert draw(saved) == draw(live)


def test_a_loader_stands_for_its_generators(store: JobStore) -> None:
    def make(seed: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(TensorDataset(torch.arange(9)), shuffle=True, generator=generator)

    saved, live = make(1), make(2)
    list(saved)
    reload(store, {"loader": saved}, {"loader": live})
    assert [x.item() for (x,) in saved] == [x.item() for (x,) in live]


def test_values_lists_and_dicts_come_back_in_place(store: JobStore) -> None:
    saved: dict[str, Any] = {
        "best": 0.1,
        "name": "run",
        "shape": (2, (3, "x")),
        "log": [1, 2.5, None, [3]],
        "state": {"hidden": torch.ones(2), "step": 7, 3: {"deep": [torch.zeros(1)]}},
        "counts": Counter(a=3),
        "array": np.arange(4, dtype=np.float32),
    }
    log: list[Any] = ["other"]
    hidden = torch.zeros(2)
    live: dict[str, Any] = {
        "best": 9.0,
        "name": "",
        "shape": None,
        "log": log,
        "state": {"hidden": hidden, "stale": 1},
        "counts": Counter(b=1),
        "array": np.zeros(4, dtype=np.float32),
    }
    loaded = reload(store, saved, live)
    assert (loaded["best"], loaded["name"], loaded["shape"]) == (0.1, "run", (2, (3, "x")))
    assert log == [1, 2.5, None, [3]]
    assert loaded["log"] is log
    assert loaded["state"] is live["state"]
    assert live["state"]["hidden"] is hidden
    assert hidden.tolist() == [1, 1]
    assert list(live["state"]) == ["hidden", "step", 3]
    assert live["counts"] == Counter(a=3)
    assert isinstance(live["counts"], Counter)
    assert live["array"].tolist() == [0, 1, 2, 3]


def test_objects_inside_lists_are_loaded_in_place(store: JobStore) -> None:
    saved, live = [nn.Linear(2, 2), nn.Linear(2, 1)], [nn.Linear(2, 2), nn.Linear(2, 1)]
    parts = list(live)
    reload(store, {"nets": saved}, {"nets": live})
    assert [module_bits(part) for part in parts] == [module_bits(part) for part in saved]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


@pytest.mark.filterwarnings(
    "ignore:The epoch parameter in .scheduler.step.*:UserWarning"
)  # torch 2.6, of its own
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(store: JobStore, name: str) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any, nn.Module]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer), model

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
        found = []
        for _ in range(4):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    saved, live = make(), make()
    rates(*saved[:2])
    names = ("optimizer", "scheduler", "model")
    reload(store, dict(zip(names, saved, strict=True)), dict(zip(names, live, strict=True)))
    assert rates(*saved[:2]) == rates(*live[:2])


def test_a_file_from_another_device_loads(store: JobStore) -> None:
    """A snapshot that says ``cuda:3`` everywhere, as the same job would have written it there."""
    saved, live = nn.Linear(2, 2), nn.Linear(2, 2)
    theirs, ours = (torch.optim.Adam(model.parameters()) for model in (saved, live))
    saved(torch.ones(1, 2)).sum().backward()
    theirs.step()
    named = {"m": saved, "o": theirs, "state": {"hidden": torch.ones(3)}}
    snapshot = save(store, named)
    tree = snapshot.tree.replace(b'"cpu"', b'"cuda:3"')
    assert tree != snapshot.tree
    snapshot.tree = tree  # type: ignore[misc]
    state = {"hidden": None}
    check(snapshot, {"m": live, "o": ours, "state": state}).apply()
    assert module_bits(saved) == module_bits(live)
    assert ours.state[live.weight]["exp_avg"].device.type == "cpu"
    assert str(state["hidden"].device) == "cpu"  # type: ignore[attr-defined]


def test_optimizer_state_goes_where_the_parameters_are(store: JobStore) -> None:
    """The counter stays on the host, the model is elsewhere now; meta stands for a GPU."""
    saved, live = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    theirs, ours = (torch.optim.Adam(model.parameters()) for model in (saved, live))
    saved(torch.ones(1, 2)).sum().backward()
    theirs.step()
    count, counted = torch.ones(1), torch.zeros(1)
    theirs_named = {"count": count, "m": saved, "o": theirs}
    reload(store, theirs_named, {"count": counted, "m": live, "o": ours})
    assert counted.item() == 1
    state = ours.state[live.weight]
    assert (state["exp_avg"].device.type, state["step"].device.type) == ("meta", "cpu")
    assert live.weight.grad is not None
    assert live.weight.grad.device.type == "meta"
