"""Optimizers, samplers and loops that keep state beside their ``state_dict``, as published ones do."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import multiprocessing
import random
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

ROWS, WIDTH = 12, 4


def params_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


class Climber(Optimizer):
    """Climbs, then lets an SGD step that has its groups (sharpness-aware minimization)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.inner = SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in params_of(self):
            self.state[p]["up"] = p.grad * 0.01 if p.grad is not None else torch.zeros_like(p)
            p.sub_(self.state[p]["up"])
        self.inner.step()


class SlowWeights(Optimizer):
    """Keeps slow weights and a count in attributes, and writes through ``.data`` (lookahead)."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {})
        self.inner = Adam(params, lr=0.02)
        self.param_groups = self.inner.param_groups
        self.state = defaultdict(dict)
        self.fast_state = self.inner.state
        self.slow = [p.detach().clone() for p in params_of(self)]
        self.count = 0
        self.defaults = self.inner.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        for slow, p in zip(self.slow, params_of(self), strict=True):
            if self.count % 3 == 0:
                slow.data.add_(p.data - slow.data, alpha=0.5)
                p.data.copy_(slow.data)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)
        self.fast_state = self.inner.state


class ModeSwitcher(SGD):
    """Averages in its own tensors, and swaps them in for evaluation (schedule-free)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        self.train_mode = True
        self.weight_sum = 0.0
        self.averages: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.weight_sum += 0.5
        for p in params_of(self):
            self.averages.setdefault(p, p.clone()).lerp_(p, 1 / (1 + self.weight_sum))

    @torch.no_grad()
    def switch(self) -> None:
        for p in params_of(self):
            if p in self.averages:
                held = p.clone()
                p.copy_(self.averages[p])
                self.averages[p].copy_(held)
        self.train_mode = not self.train_mode


class Several(Optimizer):
    """Has an optimizer for matrices and one for the rest, in a dictionary, and a history of them."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.02})
        self.parts = OrderedDict(
            matrices=SGD([p for p in params if p.ndim > 1], lr=0.05, momentum=0.8),
            rest=Adam([p for p in params if p.ndim < 2], lr=0.02),
        )
        self.recent: deque[int] = deque(maxlen=2)
        self.used: Counter[str] = Counter()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        name = "matrices" if len(self.recent) % 2 == 0 or self.recent[-1] % 2 else "rest"
        self.parts[name].step()
        self.recent.append(sum(self.used.values()))
        self.used[name] += 1


class NoisyStep(SGD):
    """Draws noise from a generator of its own, and adds it through flat views of the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05, momentum=0.5)
        self.noise = torch.Generator().manual_seed(3)
        self.flat: list[torch.Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        if self.flat is None:
            self.flat = [p.data.view(-1) for p in params_of(self)]
        for view in self.flat:
            view.add_(torch.randn(view.shape, generator=self.noise), alpha=0.01)


class SlottedCount(SGD):
    """Keeps its count in an object with slots, which an alias leads to, and a list that holds itself."""

    class Count:
        __slots__ = ("steps", "steps_of")

        def __init__(self) -> None:
            self.steps, self.steps_of = 0, {}

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        self.count = self.alias = self.Count()
        self.ring: list[Any] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = 0.05 / (1 + self.alias.steps)
        self.count.steps += 1
        self.count.steps_of[self.param_groups[0]["params"][0]] = self.count.steps
        if self.ring:
            assert self.ring[0] is self.ring
        self.ring[:] = [self.ring, self.count]
        super().step()


class WithIterator(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        self.rates = itertools.cycle([0.01, 0.03, 0.02])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = next(self.rates)
        super().step()


class MadeLater(SGD):
    inner: Optimizer | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.inner is None:
            self.inner = SGD(self.param_groups, lr=0.01, momentum=0.9)
        self.inner.step()


class ById(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        self.sums: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in params_of(self):
            self.sums[id(p)] = self.sums.get(id(p), torch.zeros_like(p)) + p
            p.sub_(self.sums[id(p)], alpha=0.01)


class Rated(SGD):
    """Takes its rate from a count of its steps."""

    calls = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        self.begin()

    def begin(self) -> None: ...

    def count(self) -> float:
        raise NotImplementedError

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = 0.05 / (1 + self.count())
        super().step()


class InTheClass(Rated):
    def begin(self) -> None:
        type(self).calls = 0

    def count(self) -> float:
        type(self).calls += 1
        return self.calls


class SeenThrough(Rated):
    """Counts in a namespace, in variables of a thread, and by the method of a list."""

    def begin(self) -> None:
        self.space, self.local, self.add = types.SimpleNamespace(n=0), threading.local(), [0].append
        self.local.n = 0

    def count(self) -> float:
        self.space.n += 1
        self.local.n += 2
        self.add(0)
        return self.space.n + self.local.n + len(self.add.__self__)  # type: ignore[attr-defined]


class SharedValue(Rated):
    def begin(self) -> None:
        self.shared = multiprocessing.Value("i", 0)

    def count(self) -> float:
        self.shared.value += 1
        return self.shared.value


class Key: ...


KEY = Key()


class WeakKeys(Rated):
    def begin(self) -> None:
        self.counts = weakref.WeakKeyDictionary({KEY: 0})

    def count(self) -> float:
        self.counts[KEY] += 1
        return self.counts[KEY]


class Spawning(Rated):
    def begin(self) -> None:
        self.rng = np.random.default_rng(3)

    def count(self) -> float:
        return float(self.rng.spawn(1)[0].random())


def in_a_hook(params: Any) -> Optimizer:
    """An optimizer with a hook that counts in its own variable."""
    optimizer, calls = SGD(params, lr=0.05), 0

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        optimizer.param_groups[0]["lr"] = 0.05 / calls

    optimizer.register_step_pre_hook(before)
    return optimizer


def in_a_closure(params: Any) -> Optimizer:
    """An optimizer whose step was replaced by a function that counts in its own variables."""
    optimizer, calls, seen = SGD(params, lr=0.05), 0, []

    def rate() -> float:
        nonlocal calls
        calls += 1
        seen.append(calls)
        return 0.1 / (calls + len(seen))

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["lr"] = optimizer.rate()

    optimizer.rate = rate  # type: ignore[attr-defined]
    optimizer.register_step_pre_hook(before)
    return optimizer


#: What makes an optimizer, and how a restart goes: "" if exactly, else the attribute that forbids it.
OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "climber": (Climber, ""),
    "slow weights": (SlowWeights, ""),
    "mode switcher": (ModeSwitcher, ""),
    "several": (Several, ""),
    "noisy": (NoisyStep, ""),
    "slotted": (SlottedCount, ""),
    "closure": (in_a_closure, ""),
    "class": (InTheClass, ""),
    "hook": (in_a_hook, ""),
    "seen through": (SeenThrough, ""),
    "shared value": (SharedValue, "optimizer.shared is a Synchronized, which has changed"),
    "weak keys": (WeakKeys, "optimizer.counts is a WeakKeyDictionary, which has changed"),
    "spawning": (Spawning, "optimizer.rng has spawned generators"),
    "iterator": (WithIterator, "optimizer.rates is a cycle"),
    "made later": (MadeLater, "optimizer.inner is a SGD, which was made after gpuslice.attach"),
    "by id": (ById, r"optimizer.sums has the id\(\) of model.0.weight as a key"),
}


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(WIDTH, dtype=torch.float32).add(index).cos()


class ByEpoch(Sampler[int]):
    """Shuffles by the number of passes that it has counted."""

    epoch = 0

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.epoch).permutation(ROWS).tolist()
        self.epoch += 1
        return iter(order)

    def __len__(self) -> int:
        return ROWS


class ManyKinds(Sampler[int]):
    """Draws from generators of three libraries and turns a deque around."""

    def __init__(self) -> None:
        self.rng, self.python = np.random.default_rng(1), random.Random(2)
        self.torch = torch.Generator().manual_seed(3)
        self.window: deque[int] = deque(range(ROWS), maxlen=ROWS)

    def __iter__(self) -> Iterator[int]:
        self.window.rotate(self.python.randrange(ROWS))
        self.rng.shuffle(order := list(self.window))
        self.window.append(order[0])
        yield from order[: 6 + int(torch.randint(6, (), generator=self.torch))]


class Refilled(Sampler[int]):
    """Works off a new queue under a second name, and keeps the rest for the next pass."""

    def __init__(self) -> None:
        self.queue: deque[int] = deque()
        self.rounds = 0

    def __iter__(self) -> Iterator[int]:
        if not self.queue:
            self.rounds += 1
            self.queue = deque(np.random.default_rng(self.rounds).permutation(10).tolist())
        queue = self.queue
        for _ in range(7):
            yield queue.popleft() if queue else self.rounds


class NewGenerators(Sampler[int]):
    """Makes itself a generator when it is asked first, and a new one in each pass."""

    first: Any = None
    seed = 0

    def __iter__(self) -> Iterator[int]:
        self.first = self.first or random.Random(5)
        self.seed = self.first.randrange(99)
        self.rng = np.random.default_rng(self.seed)
        return iter(self.rng.permutation(ROWS).tolist())


class Batches(Sampler[list[int]]):
    """A batch sampler whose batches grow from pass to pass."""

    def __init__(self) -> None:
        self.passes, self.given = 0, 0

    def __iter__(self) -> Iterator[list[int]]:
        size = 2 + self.passes
        for start in range(0, ROWS, size):
            self.given += 1
            yield [(row + self.given) % ROWS for row in range(start, min(start + size, ROWS))]
        self.passes += 1


class Curriculum(Sampler[int]):
    """Chooses from a part of the rows that the training loop makes larger."""

    def __init__(self) -> None:
        self.limit = 2
        self.seen: set[int] = set()
        self.phase = Phase.WARM

    def __iter__(self) -> Iterator[int]:
        self.phase = Phase.MAIN if self.seen else Phase.WARM
        order = torch.randperm(ROWS)[: self.limit + 2].tolist()
        self.seen.update(order)
        return iter(order * (2 if self.phase is Phase.MAIN else 3))


class Phase(Enum):
    WARM = 0
    MAIN = 1


class Endless(Sampler[int]):
    """Goes on in its order from pass to pass: an iterator that it keeps."""

    def __init__(self) -> None:
        self.rows = iter(itertools.cycle(range(ROWS)))

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.rows, 7)


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.passes: list[int] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes.append(len(self.passes))
        for row in range(8):
            yield torch.full((WIDTH,), float(row * sum(self.passes))).sin()


class CountingCollate:
    def __init__(self) -> None:
        self.calls = np.zeros(2, dtype=np.int64)

    def __call__(self, rows: list[torch.Tensor]) -> torch.Tensor:
        self.calls[0] += 1
        return torch.stack(rows) + float(self.calls[0])


class Mutating(Numbers):
    """Data that changes where it is read: in a tensor, in an array, in a long list."""

    def __init__(self) -> None:
        self.rows = torch.zeros(ROWS, WIDTH)
        self.factors = np.ones(ROWS)
        self.reads = [0] * 1000
        self.labels = [(f"row {row}", row) for row in range(1000)]

    def __getitem__(self, index: int) -> torch.Tensor:
        self.rows[index] += 1
        self.factors[index] *= 0.9
        self.reads[index] += 1
        return super().__getitem__(index) * self.rows[index] * self.factors[index] + self.reads[index]


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, ROWS + 1), ROWS)  # type: ignore[arg-type]


def _of(sampler: Sampler[int]) -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(), batch_size=3, sampler=sampler)


LOADERS: dict[str, tuple[Callable[[], DataLoader[torch.Tensor]], str]] = {
    "by epoch": (lambda: _of(ByEpoch()), ""),
    "many kinds": (lambda: _of(ManyKinds()), ""),
    "refilled": (lambda: _of(Refilled()), ""),
    "new generators": (lambda: _of(NewGenerators()), ""),
    "batches": (lambda: DataLoader(Numbers(), batch_sampler=Batches()), ""),
    "curriculum": (lambda: _of(Curriculum()), ""),
    "weighted": (lambda: _of(weighted()), ""),
    "stream": (lambda: DataLoader(Stream(), batch_size=3), ""),
    "collate": (lambda: DataLoader(Numbers(), batch_size=3, collate_fn=CountingCollate()), ""),
    "mutating": (lambda: DataLoader(Mutating(), batch_size=3, shuffle=True), ""),
    "endless": (lambda: _of(Endless()), r"sampler.rows is a cycle"),
}


class Best(NamedTuple):
    loss: float
    weights: torch.Tensor


@dataclasses.dataclass
class Mark:
    step: int


class Stopper:
    """Early stopping, averages and a log in a callback; they are no part of its ``state_dict``."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.average = copy.deepcopy(model)
        self.best: Best | None = None
        self.log: list[Any] = []
        self.bad = 0

    def state_dict(self) -> dict[str, Any]:
        return {"bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bad = state["bad"]

    @torch.no_grad()
    def __call__(self, loss: torch.Tensor) -> None:
        for mine, its in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mine.lerp_(its, 0.25)
        if self.best is None or loss.item() < self.best.loss:
            self.best = Best(loss.item(), next(self.model.parameters()).clone())
        else:
            self.bad += 1
            next(self.model.parameters()).lerp_(self.best.weights, 0.1)
        self.log.append(Mark(len(self.log)))
        if len(self.log) % 4 == 0:
            self.model.load_state_dict(self.average.state_dict())


class Rate:
    """A learning rate that counts its calls, as `LambdaLR` may have it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / self.calls


class Counting(nn.Module):
    """A module with numbers, a hidden state and a window that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.running = 0, 0.5
        self.hidden = torch.zeros(1)
        self.last: torch.Tensor | None = None
        self.window: deque[float] = deque([0.0], maxlen=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.running = 0.9 * self.running + 0.1 * float(x.detach().mean())
        self.hidden = (self.hidden + x.detach().mean()).tanh()
        self.window.append(self.running)
        self.last = x * (1 + self.hidden) + sum(self.window) / self.calls
        return self.last
