"""Makes Ray's ``TorchTrainer`` use the job's ranks as its workers.

By default, a trainer has Ray start its workers as actors, which are no ranks of the job. In a job, torchrun
has started the ranks already, and they have the devices. So a trainer is told to have no workers. That is
Ray's local mode: it calls the training function in this process, whose rank torchrun's variables say.
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

#: The module of the class that has a local mode. Ray Train V1 has another class, without local mode.
MODULE = "ray.train.v2.torch.torch_trainer"
_LOCAL_MODE = "LocalTorchController"


def install(module: str) -> None:
    """Change ``TorchTrainer`` in ``module``, which has just been imported, to train in the job's ranks."""
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
    """Return a copy of ``scaling_config`` with no workers, because the job's ranks are the workers.

    Raises
    ------
    UsageError
        If it asks for another number of workers than the job has ranks.
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
