"""A rank of a linear regression that grows and shrinks; writes down what it does to FILE.<rank>.

Words: the file; how many ranks begin; "STEP:WIDTH,..." when to resize; further words: ``scaled`` scales the
learning rate, ``momentum`` adds momentum, ``inner`` has it in an optimizer within the attached one,
``stop-at-N`` kills the process after step N, ``until-1-3-1`` goes on until these widths were there and an
epoch is over, a few steps a second; ``crowded`` makes steps as many times as long as there are ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset

from gpuslice import elastic

LENGTH, FEATURES, BATCH, MICRO_BATCH, EPOCHS, RATE = 62, 8, 12, 3, 2, 0.1


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = 2 * torch.rand(LENGTH, FEATURES, generator=generator) - 1
    return inputs, inputs @ torch.linspace(-1, 1, FEATURES) + 0.1 * torch.randn(LENGTH, generator=generator)


def digest(*parts: object) -> str:
    """Of tensors and plain values, bit for bit."""
    seen = hashlib.sha256()
    for part in parts:
        seen.update(
            part.detach().numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode()
        )
    return seen.hexdigest()[:16]


class Run:
    """What the words ask for, and what becomes of it."""

    def __init__(self) -> None:
        path, ranks, schedule, *self.words = sys.argv[1:]
        pairs = (pair.split(":") for pair in schedule.split(",") if pair)
        self._resizes = {int(step): int(width) for step, width in pairs}
        self._wanted = next(
            (word.removeprefix("until") for word in self.words if word.startswith("until")), ""
        )
        self.begin = int(ranks) or None
        self.rank = int(os.environ.get("RANK", "0"))
        #: The widths that it had; attach it.
        self.history: list[int] = []
        self._log = open(f"{path}.{self.rank}", "a")  # noqa: SIM115

    def train(
        self,
        world: Any,
        sampler: elastic.ElasticSampler,
        dataset: TensorDataset,
        one: Callable[[Any], dict[str, Any]],
        end: Callable[[], str],
    ) -> None:
        """Make all steps; ``one`` makes one and says what is to be written down of it, ``end`` at the end."""
        slow_s = 0.05 if self._wanted else 0.0
        for _ in world.epochs(100 if self._wanted else int(os.environ.get("EPOCHS", str(EPOCHS)))):
            for batch in world.batches(dataset):
                if self.history[-1:] != [world.width]:
                    self.history.append(world.width)
                time.sleep(slow_s * (world.width if "crowded" in self.words else 1))
                step = sampler.epoch * -(-LENGTH // BATCH) + sampler.position // BATCH
                line = one(batch) | {"step": step, "epoch": world.epoch, "width": world.width}
                line |= {"number": world.number, "loss": batch.loss, "samples": batch.samples}
                self._write(line)
                if f"stop-at-{step}" in self.words:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step in self._resizes:
                    world.resize(self._resizes[step])
            if self._wanted and self._wanted in "".join(f"-{width}" for width in self.history):
                break
        self._write({"end": end()})

    def _write(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self._log, flush=True)


class Wrapping(torch.optim.Optimizer):
    """An optimizer whose steps another one makes, which its own ``state_dict`` leaves out."""

    def __init__(self, parameters: Any, rate: float) -> None:
        super().__init__(parameters, {"lr": rate})
        self.inner = torch.optim.SGD(self.param_groups, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def main() -> None:
    run = Run()
    torch.manual_seed(run.rank)  # what rank 0 begins with is what counts
    model = torch.nn.Linear(FEATURES, 1)
    momentum = 0.9 if "momentum" in run.words else 0.0
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=momentum)
    if "inner" in run.words:
        optimizer = Wrapping(model.parameters(), RATE)
    dataset = TensorDataset(torch.arange(LENGTH), *data())
    scaling = "learning_rate" if "scaled" in run.words else "accumulation"
    sampler = elastic.ElasticSampler(dataset, BATCH, MICRO_BATCH, seed=5, scaling=scaling)
    world = elastic.attach(
        history=run.history, model=model, optimizer=optimizer, sampler=sampler, ranks=run.begin
    )

    def one(batch: Any) -> dict[str, Any]:
        state = digest(*model.parameters(), *(sampler.epoch, sampler.position), *buffers(optimizer))
        seen = []
        for indices, inputs, targets in batch:
            seen += indices.tolist()
            batch.backward(torch.nn.functional.mse_loss(model(inputs).squeeze(1), targets))
        optimizer.step()
        optimizer.zero_grad()
        after = {"weight": model.weight.tolist()[0], "bias": model.bias.tolist()[0]}
        return {"state": state, "seen": seen, "rate": optimizer.param_groups[0]["lr"], **after}

    run.train(world, sampler, dataset, one, lambda: digest(*model.parameters(), *buffers(optimizer)))


def buffers(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The momentum of each parameter."""
    return [
        state["momentum_buffer"]
        for state in getattr(optimizer, "inner", optimizer).state.values()
        if state.get("momentum_buffer") is not None
    ]


if __name__ == "__main__":
    main()
