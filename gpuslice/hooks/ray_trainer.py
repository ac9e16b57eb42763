"""Ray's ``TorchTrainer`` in a job: the job's ranks are its workers.

By itself a trainer has Ray start its workers as actors, which are no ranks of the job. In a job the ranks are
there already: torchrun has started them, and they have the devices. So a trainer is told to have no workers.
That is Ray's local mode: the training function is called in this process, which is the rank that torchrun's
variables say.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from typing import Any

from gpuslice.errors import EnvironmentUnusableError, GpusliceError, UsageError, hide_own_frames
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime.ending import end

#: Where the class is; Ray Train V1, which has no local mode, has one of its own.
MODULE = "ray.train.v2.torch.torch_trainer"
_LOCAL_MODE = "LocalTorchController"


def install(module: str) -> None:
    """Change the trainer of ``module``, which has just been imported."""
    trainer = sys.modules[module].TorchTrainer
    make = trainer.__init__

    @functools.wraps(make)
    def __init__(self: Any, *words: Any, scaling_config: Any = None, **named: Any) -> None:
        try:
            scaling_config = _in_ranks(module, scaling_config)
        except GpusliceError as error:
            end(error)
        try:
            make(self, *words, scaling_config=scaling_config, **named)
        except BaseException as error:
            hide_own_frames(error)
            raise

    trainer.__init__ = __init__


def _in_ranks(module: str, scaling_config: Any) -> Any:
    """``scaling_config`` for a trainer whose workers are there already.

    Raises
    ------
    UsageError
        If it wants another number of them.
    EnvironmentUnusableError
        If this Ray has no local mode for several ranks.
    """
    if module != MODULE or not hasattr(sys.modules[module], _LOCAL_MODE):
        raise EnvironmentUnusableError(
            "a TorchTrainer's training function cannot be called in the job's ranks: this Ray Train has no "
            "local mode",
            "install Ray 2.60 or newer, and do not set RAY_TRAIN_V2_ENABLED=0",
        )
    if scaling_config is None:
        scaling_config = sys.modules[module].ScalingConfig()
    wanted = scaling_config.num_workers
    least, most = (wanted, wanted) if isinstance(wanted, int) else wanted
    ranks = RankIdentity.from_environ(os.environ).world_size
    if most and not least <= ranks <= most:
        raise UsageError(
            f"the script's TorchTrainer has {_listed(least, most)}, but its job has {ranks}",
            f"submit it with --devices {most}, or start it with torchrun --nproc-per-node {most}",
        )
    return dataclasses.replace(scaling_config, num_workers=0)


def _listed(least: int, most: int) -> str:
    return f"{least} worker{'' if least == 1 else 's'}" if least == most else f"{least} to {most} workers"
