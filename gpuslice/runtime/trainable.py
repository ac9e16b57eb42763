"""Finds the trainable tensors of a job, in its optimizers or in a model, and measures their skew."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpuslice.errors import UsageError
from gpuslice.profiler.skew import Skew, measure_skew
from gpuslice.runtime.threads.training_thread import TrainingThread

#: After this number of optimizer steps, every optimizer of a usual loop has been seen.
FIRST_STEPS = 3


def tensor_sizes(parameters: Iterable[torch.Tensor]) -> list[int]:
    """Return the bytes of each trainable tensor of ``parameters``. Repeated tensors count once."""
    unique = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
    return [parameter.numel() * parameter.element_size() for parameter in unique.values()]


class Optimizers:
    """The optimizers that have made steps in this process, as noted by `saw`."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[torch.optim.Optimizer]] = {}

    def saw(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that ``optimizer`` has made a step."""
        if id(optimizer) not in self._seen:
            self._seen[id(optimizer)] = weakref.ref(optimizer)

    def skew(self) -> Skew | None:
        """Return the skew of the tensors that the optimizers train; None if there are no such tensors."""
        alive = [optimizer for found in self._seen.values() if (optimizer := found()) is not None]
        groups = (group for optimizer in alive for group in optimizer.param_groups)
        sizes = tensor_sizes(parameter for group in groups for parameter in group["params"])
        return measure_skew(sizes) if any(sizes) else None


def report_skew(report: Callable[[Skew], None], thread: TrainingThread) -> None:
    """Have ``report`` called with the job's skew after its first optimizer steps. Later steps cost nothing.

    Only steps of ``thread`` in this process count: other threads and forks have models of their own.
    """
    optimizers, steps, own = Optimizers(), 0, os.getpid()

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal steps
        if torch.compiler.is_compiling() or os.getpid() != own or threading.get_ident() != thread.ident:
            return
        optimizers.saw(optimizer)
        steps += 1
        if steps == FIRST_STEPS:
            handle.remove()
            skew = optimizers.skew()
            if skew is not None:
                report(skew)

    handle = register_optimizer_step_post_hook(stepped)


def skew_of_factory(name: str) -> Skew:
    """Return the skew of the model that ``package.module:factory`` makes on the memoryless ``meta`` device.

    Raises
    ------
    UsageError
        If there is no such factory, if it fails, or if it does not make a model.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise UsageError(f"{name!r} names no factory", "write package.module:factory")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"cannot import {module_name}: {error}", "check the name and PYTHONPATH") from error
    except Exception as error:
        raise _failure(f"importing {module_name}", error) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise UsageError(f"{module_name} has no factory {attribute!r}", "name a function or class in it")
    with torch.device("meta"):
        try:
            model = factory()
        except Exception as error:
            raise _failure(f"calling {name} without arguments", error) from error
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"{name} makes a {type(model).__name__}, not a torch.nn.Module",
            "name a factory that returns a module",
        )
    return measure_skew(tensor_sizes(model.parameters()))


def _failure(what: str, error: Exception) -> UsageError:
    """Return a `UsageError` for an error of the user's code, which names the last line of that code."""
    libraries = [str(Path(file).parent) for file in (torch.__file__, importlib.__file__)]
    elsewhere = (__file__, *libraries, "<frozen ")
    trace = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in trace if not frame.filename.startswith(elsewhere)]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return UsageError(
        f"{what} failed: {type(error).__name__}: {error}{where}",
        "name a factory that makes a model on torch's meta device",
    )
