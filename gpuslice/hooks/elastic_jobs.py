"""Refuses scripts that do not use `gpuslice.elastic`, although their job was submitted to grow and shrink."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpuslice.errors import UsageError
from gpuslice.runtime.ending import end
from gpuslice.runtime.runtime import Runtime

_REMEDY = "use gpuslice.elastic (docs/elastic.md), or submit it with one number: --devices N"


def check_group(job: Runtime) -> None:
    """Check, when the script makes a process group of its own, that it uses `gpuslice.elastic`.

    Raises
    ------
    UsageError
        If `gpuslice.elastic.attach` was not called.
    """
    if not _elastic(job):
        raise UsageError(
            "the job may have more or fewer devices later, and its script makes a process group of its own",
            _REMEDY,
        )


def watch_steps(job: Runtime) -> None:
    """End the script with an error at its next optimizer step, if it has not called `elastic.attach`."""

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not _elastic(job):
            end(
                UsageError(
                    "the job may have more or fewer devices later, and its script trains without knowing",
                    _REMEDY,
                )
            )

    register_optimizer_step_pre_hook(before)


def _elastic(job: Runtime) -> bool:
    return job.attached is not None and job.attached.replicated
